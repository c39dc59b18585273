"""Where the figures come from: the machine, its memory bandwidth, its noise, and all versions."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from collective.nccl.binding import load_binding, words
from common import __version__
from common.errors import UsageError
from common.system.memory import aligned_empty
from common.system.mkl import CPU_TYPE, wanted_cpu_type

__all__ = ["cpu_name", "describe_environment", "installed", "machine_of"]

PACKAGES = (
    *("paddlepaddle", "numpy", "grpcio", "protobuf", "cupy-cuda12x", "cupy-cuda13x", "pynccl"),
    *("torch", "ray", "mpi4py"),
)
PROBE_BYTES = 100_000_000
PROBE_REPEATS = 9


def describe_environment() -> dict[str, Any]:
    """A plain dict for results.json; takes about 0.3 s for the memory probe."""
    bandwidth, noise = probe_memory()
    return {
        "cpu": cpu_name(),
        **({} if (cpu_type := wanted_cpu_type()) is None else {"mkl_cpu_type": cpu_type}),
        **gpus(),
        "governor": governor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memcpy_gb_per_s": round(bandwidth, 2),
        "noise": round(noise, 3),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {
            "gradsync": __version__,
            **{name: found for name in PACKAGES if (found := installed(name))},
            **open_mpi(),
        },
        "commit": commit(),
    }


def machine_of(environment: Mapping[str, Any]) -> str:
    """What computed, in words; `environment` of any results."""
    kernels = [f"{CPU_TYPE}={environment['mkl_cpu_type']}"] if "mkl_cpu_type" in environment else []
    return ", ".join([str(environment.get("cpu")), f"{environment.get('cores')} cores", *kernels])


def probe_memory() -> tuple[float, float]:
    """(GB/s of one 100 MB memcpy, counting the bytes copied once; its relative spread, (p75 - p25) / median)."""
    source, target = aligned_empty(PROBE_BYTES, np.uint8), aligned_empty(PROBE_BYTES, np.uint8)
    source.fill(1)
    target.fill(0)
    seconds = []
    for _ in range(PROBE_REPEATS):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    low, median, high = np.percentile(seconds, [25, 50, 75])
    return PROBE_BYTES / float(median) / 1e9, float((high - low) / median)


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def governor() -> str | None:
    """Of the first CPU's frequency; None where the kernel does not tell, as in most virtual machines."""
    try:
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
    except OSError:
        return None


def gpus() -> dict[str, str]:
    """Their names, the driver and the NCCL that CuPy loads; nothing where there is none."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {}
    try:
        nccl = words(load_binding().version)
    except UsageError as exc:
        nccl = f"absent: {exc}"
    return {"gpus": found.replace("\n", "; "), "nccl": nccl}


def open_mpi() -> dict[str, str]:
    """The version of the mpirun that is found; nothing where there is none, or another library's."""
    try:
        found = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    version_of_it = re.match(r"mpirun \(Open MPI\) (\S+)", found)
    return {"Open MPI": version_of_it[1]} if version_of_it else {}


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The short commit of the source tree, with a + where it has changes; None outside a checkout."""
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
