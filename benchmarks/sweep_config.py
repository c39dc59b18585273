"""The flags of `python -m benchmarks sweep`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.config import numbers
from benchmarks.peers import PEERS
from common.config import check_rank
from common.errors import UsageError, choose

__all__ = ["SweepConfig", "size_in_bytes", "size_in_words"]

UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
OPS = ("all_reduce",)


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Time an operation over sizes and numbers of ranks, beside other libraries and the machine's own limits."""

    op: str = "all_reduce"
    """Operation: all_reduce (sum of float32, in place)."""
    nranks: str = "2,4"
    """Numbers of ranks, separated by commas."""
    sizes: str = "4KiB,64KiB,1MiB,16MiB,100MB"
    """Bytes of the array on each rank, separated by commas; KiB, MiB are powers of 2, KB, MB powers of 10."""
    backends: str = "shm,shm-copied,tcp,gloo,torch-gloo,mpi,memory-limit,loopback-limit"
    """What to measure, separated by commas; what is not installed is named as absent. On GPUs: nccl, nccl-ring,
    nccl-raw (their limit) and torch-nccl."""
    repetitions: int = 5
    """Rounds; in each, every backend is measured in turn. Medians over rounds are reported."""
    seconds: float = 0.2
    """About how long a backend runs at one size in one round."""
    out: Path = Path("out/sweep")
    """Folder for sweep.json and sweep.md."""

    def __post_init__(self) -> None:
        choose("op", self.op, OPS)
        for count in numbers("nranks", self.nranks):
            check_rank(0, count)
        for name in self.backends.split(","):
            choose("backend", name, PEERS)
        if not self.bytes:
            raise UsageError("--sizes must name at least one size")
        if self.repetitions < 1 or not self.seconds > 0:
            raise UsageError("--repetitions must be at least 1, --seconds positive")

    @property
    def bytes(self) -> list[int]:
        return [size_in_bytes(size) for size in self.sizes.split(",")]


def size_in_bytes(text: str) -> int:
    """
    >>> size_in_bytes("4KiB"), size_in_bytes("100MB")
    (4096, 100000000)
    """
    found = re.fullmatch(r"(\d+)\s*([KMG]?i?B?)", text.strip(), re.IGNORECASE)
    unit = found[2].upper() if found else ""
    unit = unit + "B" if unit and not unit.endswith("B") else unit or "B"
    if not found or unit not in UNITS or (size := int(found[1]) * UNITS[unit]) % 4 or not size:
        raise UsageError(f"--sizes: {text!r} is not a size such as 4KiB or 100MB, in whole float32s")
    return size


def size_in_words(size: int) -> str:
    """
    >>> size_in_words(4096), size_in_words(100_000_000), size_in_words(1000)
    ('4 KiB', '100 MB', '1 KB')
    """
    for unit in ("GIB", "GB", "MIB", "MB", "KIB", "KB"):
        if size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]} {unit.replace('IB', 'iB')}"
    return f"{size} B"
