"""Where the figures come from: the machine, its memory bandwidth, its noise, and all versions."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

import numpy as np
import psutil

from benchmarks.records.results import Environment, command_line, moment
from collective.nccl.binding import load_binding, words
from common import __version__
from common.errors import UsageError
from common.system.memory import aligned_empty
from common.system.mkl import CPU_TYPE, wanted_cpu_type

__all__ = ["cpu_name", "describe_environment", "head", "installed", "machine_of"]

PACKAGES = (
    *("paddlepaddle", "numpy", "grpcio", "protobuf", "cupy-cuda12x", "cupy-cuda13x", "pynccl"),
    *("torch", "ray", "mpi4py"),
)
PROBE_BYTES = 100_000_000
PROBE_REPEATS = 9


class Head(TypedDict):
    """What results of every kind begin with, as keyword arguments."""

    created: str
    command: str
    environment: Environment


def head() -> Head:
    """Of the results of this process."""
    return {"created": moment(), "command": command_line(), "environment": describe_environment()}


def describe_environment() -> Environment:
    """Takes about 0.3 s for the memory probe."""
    bandwidth, noise = probe_memory()
    cards, nccl = gpus()
    return Environment(
        cpu=cpu_name(),
        mkl_cpu_type=wanted_cpu_type(),
        gpus=cards,
        nccl=nccl,
        governor=governor(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        memcpy_gb_per_s=round(bandwidth, 2),
        noise=round(noise, 3),
        kernel=platform.release(),
        python=platform.python_version(),
        versions={
            "gradsync": __version__,
            **{name: found for name in PACKAGES if (found := installed(name))},
            **open_mpi(),
        },
        commit=commit(),
    )


def machine_of(environment: Environment) -> str:
    """What computed, in words; `environment` of any results."""
    kernels = [f"{CPU_TYPE}={environment.mkl_cpu_type}"] if environment.mkl_cpu_type is not None else []
    return ", ".join([environment.cpu, f"{environment.cores} cores", *kernels])


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


def gpus() -> tuple[str | None, str | None]:
    """Their names and driver, and the NCCL that CuPy loads; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None, None
    try:
        nccl = words(load_binding().version)
    except UsageError as exc:
        nccl = f"absent: {exc}"
    return found.replace("\n", "; "), nccl


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
