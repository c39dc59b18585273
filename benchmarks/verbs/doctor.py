"""`python -m benchmarks doctor`: what of this machine can be used, and the command that mends what cannot."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.contestants.table_of_sweeps import load_backend
from benchmarks.netlab.cluster import Cluster, why_no_cluster
from benchmarks.records.environment import cpu_name, installed
from common.credentials.credentials import find
from common.credentials.token import MAKE_TOKEN
from common.errors import GradSyncError, UsageError
from common.kernels import loader
from common.kernels.names import NEW, Reduce
from common.launch.adopting import adopted
from common.launch.engines import ENGINES, task_from
from common.launch.settings import servers_among
from common.system.mkl import CPU_TYPE, wanted_cpu_type

__all__ = ["CHECKS", "DoctorConfig", "Finding", "doctor"]

PYTHONS = ((3, 10), (3, 13))
IMPORT_S = 60.0  # for another Python process to import something; a broken driver may hang it
PACKAGES = ("numpy", "grpcio", "protobuf")
PORTS = {8500: "ps.server --port", 8600: "collective.trainer --rendezvous"}  # the defaults, and what sets another
FEATURES = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd")
SHM_BYTES = 1 << 30
SHARED_GPU = 23000  # NCCL 2.30.0, as NCCL numbers it: since then several ranks may share a GPU
KNOWN_ENGINES = [engine.name for engine in ENGINES[1:]]
PADDLE = "import paddle; print(paddle.__version__, 'CUDA' if paddle.is_compiled_with_cuda() else 'CPU')"
CUPY = (
    "import cupy; from cupy.cuda import nccl, runtime; "
    "print(cupy.__version__, runtime.runtimeGetVersion(), runtime.getDeviceCount(), nccl.get_version())"
)


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Say what of this machine GradSync and its benchmarks can use, and what mends the rest."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    usable: bool
    found: str  # or what is wrong
    mend: str = ""  # a command or a flag; "" if there is nothing to mend
    lack: str = "missing"  # what is said of it in a word or two, where it cannot be used


def doctor(_: DoctorConfig) -> None:
    """Print a line for everything that was looked at."""
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    findings = [examine(check) for check in CHECKS]
    for finding in findings:
        state = Text("ok", style="green") if finding.usable else Text(finding.lack, style="yellow")
        words = Text(finding.found)
        if finding.mend:
            words.append(f"\n-> {finding.mend}", style="bold")
        table.add_row(finding.what, state, words)
    console.print(table)
    usable = sum(finding.usable for finding in findings)
    console.print(f"\n{usable} of {len(findings)} can be used; only Python and its packages are needed by everything.")


def examine(check: Callable[[], Finding]) -> Finding:
    """What it finds; a check that itself fails is a finding too."""
    try:
        return check()
    except Exception as exc:
        return Finding(check.__name__.replace("_", " "), False, f"could not be examined: {type(exc).__name__}: {exc}")


def python() -> Finding:
    lowest, highest = (".".join(map(str, version)) for version in PYTHONS)
    usable = PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]
    mend = "" if usable else f"use Python {lowest} to {highest}"
    return Finding("Python", usable, platform.python_version(), mend, lack="untested")


def packages() -> Finding:
    found = {name: installed(name) for name in PACKAGES}
    missing = [name for name, version in found.items() if version is None]
    words = ", ".join(f"{name} {version or 'is not installed'}" for name, version in found.items())
    return Finding("packages", not missing, words, f"pip install {' '.join(missing)}" if missing else "")


def paddle() -> Finding:
    if find_spec("paddle") is None:
        return Finding("Paddle", False, "not installed; arrays only, no training", "pip install paddlepaddle")
    said, usable = imported(PADDLE)
    return Finding("Paddle", usable, said.replace(" C", ", built for C"), "" if usable else "pip install paddlepaddle")


def credentials() -> Finding:
    """What a job that is started here would have."""
    try:
        found = find()
        _ = found.identity if found.secure else None
    except UsageError as exc:
        return Finding("credentials", False, str(exc), lack="refused")
    if not found.secure:
        return Finding("credentials", False, f"none: {found.source}", "unset GRADSYNC_INSECURE", lack="insecure")
    if found.kind == "user":
        return Finding("credentials", True, f"{found.source}, for jobs of one host; for several: {MAKE_TOKEN}")
    return Finding("credentials", True, f"{found.kind}, from {found.source}")


def engine() -> Finding:
    """What has started this process, as a launcher here would see it."""
    try:
        task = adopted() or task_from()
        servers = servers_among(task) if task is not None else 0
    except UsageError as exc:
        return Finding("engine", False, str(exc), "start it so that its variables agree", lack="refused")
    if task is None or task.count == 1:
        by = "none has started this process" if task is None else f"{task}, the only one"
        return Finding("engine", True, f"{by}: a launcher starts ranks of its own ({', '.join(KNOWN_ENGINES)})")
    role = f"server {task.index} of {servers}" if task.index < servers else f"rank {task.index - servers}"
    words = f"{task}: {role} of {task.count - servers} ranks, on {task.hosts} host(s)"
    if not task.meeting:
        mend = "set GRADSYNC_RENDEZVOUS=HOST:PORT for all tasks, with the host of task 0"
        return Finding("engine", False, f"{words}; nothing says where they meet", mend, lack="incomplete")
    return Finding("engine", True, f"{words}; they meet at {task.meeting}")


def cpu() -> Finding:
    text = Path("/proc/cpuinfo").read_text()
    flags = {word for line in text.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    usable = "avx" in flags or platform.machine() != "x86_64"
    features = " ".join(feature for feature in FEATURES if feature in flags)
    mend = "" if usable else "Paddle's wheels need AVX: use another machine"
    mkl = "" if (cpu_type := wanted_cpu_type()) is None else f"; {CPU_TYPE}={cpu_type}"
    return Finding("CPU", usable, f"{cpu_name()}, {platform.machine()}; {features}{mkl}", mend, lack="too old")


def compiled_loops() -> Finding:
    loader.reduce_kernel(Reduce("mean", "float32", 2, (NEW,)))
    if reason := loader.why_not():
        mend = "pip install numba"
        if reason.startswith(loader.KERNELS_VARIABLE):
            mend = f"unset {loader.KERNELS_VARIABLE}"
        elif reason.startswith(loader.NO_FOLDER):
            mend = f"set {loader.CACHE_VARIABLE} to a folder that you can write to and nobody else (chmod go-w)"
        return Finding("compiled loops", False, f"NumPy does the work, with the same bits: {reason}", mend)
    return Finding("compiled loops", True, f"by Numba {installed('numba')}, kept in {loader.cache_folder()}")


def cores() -> Finding:
    mine, all_of_them = len(os.sched_getaffinity(0)), os.cpu_count()
    usable = mine > 1
    mend = "" if usable else "two ranks share one core: no speed-up can be seen; use a machine with more"
    return Finding("cores", usable, f"{mine} of {all_of_them} may be used", mend, lack="too few")


def memory() -> Finding:
    found = psutil.virtual_memory()
    usable = found.available > 2e9
    words = f"{found.available / 1e9:.1f} GB of {found.total / 1e9:.1f} GB available"
    mend = "" if usable else "a comparison on 4 ranks needs 2 GB: end other programs"
    return Finding("memory", usable, words, mend, lack="too little")


def memfd() -> Finding:
    try:
        os.close(os.memfd_create("gradsync-doctor"))
    except (AttributeError, OSError) as exc:
        return Finding("memfd", False, f"memfd_create: {exc}", "use Linux 3.17 or newer; --backend tcp works without")
    return Finding("memfd", True, "shared memory without names, which backend shm uses")


def shared_memory(needed: int = SHM_BYTES) -> Finding:
    """Of no concern to GradSync itself."""
    size = shutil.disk_usage("/dev/shm")
    usable = size.free >= needed
    mend = "" if usable else "docker run --shm-size=2g (or mount -o remount,size=2g /dev/shm)"
    words = f"{size.free / 1e9:.1f} GB of {size.total / 1e9:.1f} GB free, for DataLoader workers"
    return Finding("/dev/shm", usable, words, mend, lack="too small")


def gpu() -> Finding:
    if shutil.which("nvidia-smi") is None:
        return Finding("GPU", False, "there is no nvidia-smi", "install NVIDIA's driver, on a machine with a GPU")
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S, check=False)
    found = done.stdout.strip().splitlines()
    usable = not done.returncode and bool(found)
    words = "; ".join(found) if usable else " ".join((done.stdout + done.stderr).split()) or "no GPU is listed"
    return Finding("GPU", usable, words, "" if usable else "nvidia-smi says what is wrong with the driver")


def cupy_and_nccl() -> Finding:
    if find_spec("cupy") is None:
        mend = "pip install cupy-cuda12x nvidia-nccl-cu12 pynccl"
        return Finding("CuPy, NCCL", False, "CuPy is not installed", mend)
    said, usable = imported(CUPY)
    if not usable:
        return Finding("CuPy, NCCL", False, said, "pip install cupy-cuda12x nvidia-nccl-cu12 pynccl")
    cupy, cuda, devices, nccl = said.split()
    version = nccl_version(int(nccl))
    words = f"CuPy {cupy}, CUDA {int(cuda) // 1000}.{int(cuda) % 1000 // 10}, {devices} GPU(s), NCCL {version}"
    if int(nccl) >= SHARED_GPU:
        return Finding("CuPy, NCCL", True, f"{words}; several ranks may share a GPU")
    mend = "pip install 'nvidia-nccl-cu12>=2.30', and its libnccl.so.2 first in LD_LIBRARY_PATH"
    return Finding("CuPy, NCCL", True, f"{words}; one rank a GPU", mend)


def nccl_version(code: int) -> str:
    """
    >>> nccl_version(23007)
    '2.30.7'
    """
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def emulated_hosts() -> Finding:
    reason = why_no_cluster() or why_not(Cluster([12.5e6, 12.5e6]))
    if reason:
        what, _, mend = reason.partition(": ")
        return Finding("emulated hosts", False, what, mend)
    return Finding("emulated hosts", True, "network namespaces, veth, bridge and tbf: --hosts 4 --link 1gbit")


def emulated_latency() -> Finding:
    reason = why_no_cluster() or why_not(Cluster([12.5e6, 12.5e6], delay=1e-3))
    mend = "modprobe sch_netem; --latency needs it" if reason else ""
    return Finding("their latency", not reason, reason.partition(": ")[0] or "netem: --latency 0.5ms", mend)


def why_not(cluster: Cluster) -> str:
    try:
        with cluster:
            return ""
    except GradSyncError as exc:
        return str(exc)


def ports(asked: Mapping[int, str] = PORTS) -> Finding:
    taken = [port for port in asked if not is_free(port)]
    words = ", ".join(f"{port} is {'in use' if port in taken else 'free'}" for port in asked)
    mend = "; ".join(f"{asked[port]} chooses another" for port in taken)
    return Finding("ports", not taken, words, mend, lack="in use")


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def torch() -> Finding:
    return library("PyTorch", "torch", load_backend("torch-gloo").why_absent("torch-gloo"))


def mpi() -> Finding:
    return library("MPI", "mpi4py", load_backend("mpi").why_absent("mpi"))


def ray() -> Finding:
    return library("Ray", "ray", "" if find_spec("ray") else "Ray is not installed (pip install ray)")


def library(what: str, package: str, reason: str) -> Finding:
    wrong, _, mend = reason.partition(" (")
    return Finding(what, not reason, wrong or f"{package} {installed(package)}, to compare with", mend.rstrip(")"))


def imported(code: str, limit: float = IMPORT_S) -> tuple[str, bool]:
    """(what it prints, or the last line of why not; whether it ran), in a process of its own with a deadline."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"importing it took longer than {limit:g} s", False
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}", not done.returncode


CHECKS = (
    *(python, packages, paddle, cpu, compiled_loops, cores, memory, memfd, shared_memory, gpu, cupy_and_nccl),
    *(engine, credentials, emulated_hosts, emulated_latency, ports, torch, mpi, ray),
)
