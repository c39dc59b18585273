"""The flags of `python -m benchmarks sweep`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import tyro

from benchmarks.contestants.table_of_sweeps import BACKENDS, OPERATIONS, is_encrypted, over_tls, possible
from benchmarks.flags.compare import numbers
from benchmarks.netlab.config import ClusterConfig
from benchmarks.page.language import LANGUAGES
from benchmarks.stats.units import size_in_bytes
from common.errors import UsageError, choose
from common.launch.settings import check_rank

__all__ = ["SweepConfig"]

MOST_LATE_S = 20  # less than what other libraries wait for a rank


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Time an operation over sizes and numbers of ranks, beside other libraries and the machine's own limits."""

    op: str = "all_reduce"
    """Operation: all_reduce (sum of float32, in place), broadcast (from rank 0), or push_pull (a parameter server's
    round with SGD)."""
    nranks: str = "2,4"
    """Numbers of ranks, separated by commas."""
    sizes: str = "4KiB,64KiB,1MiB,16MiB,100MB"
    """Bytes of the array on each rank, separated by commas; KiB, MiB are powers of 2, KB, MB powers of 10."""
    backends: str | None = None
    """What to measure, separated by commas; what is not installed is named as absent. On GPUs: nccl, nccl-ring,
    nccl-raw (their limit) and torch-nccl. (default: all that can run)"""
    tls: bool = False
    """Beside TCP and gRPC measure the same over TLS, on the loopback too, where a job of ours would not encrypt TCP:
    tcp-tls, or ps-tcp-tls and ps-grpc-tls."""
    servers: int = 1
    """Number of parameter servers, of push_pull."""
    repetitions: int = 5
    """Rounds; in each, every backend is measured in turn. Medians over rounds are reported."""
    seconds: float = 0.2
    """About how long a backend runs at one size in one round."""
    late: float = 2.0
    """How many seconds the last rank comes late where it is measured what waiting costs the others, with all_reduce;
    0: that is not measured."""
    out: Path = Path("out/sweep")
    """Folder for sweep.json, sweep.md and sweep.html."""
    lang: str = "en"
    """Language of the report: en or zh."""
    history: Path | None = None
    """Folder that keeps the results of every run as a file, such as benchmarks/results/history. (default: none)"""
    cluster: tyro.conf.OmitArgPrefixes[ClusterConfig] = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        choose("language", self.lang, LANGUAGES)
        choose("op", self.op, OPERATIONS)
        for count in numbers("nranks", self.nranks):
            check_rank(0, count)
        for name in self.names():
            choose("backend", name, [each for each in BACKENDS if each != "link"])
            if name not in self._possible:
                where = "one host" if self.cluster.hosts is None else "emulated hosts"
                there = ", ".join(self._possible)
                raise UsageError(f"backend {name} cannot be measured for {self.op} on {where}; there are {there}")
        if self.tls and not any(map(is_encrypted, self.names())):
            raise UsageError(
                f"--tls: none of {', '.join(self.names())} is measured over TLS; tcp, ps-tcp and ps-grpc are"
            )
        if not self.bytes:
            raise UsageError("--sizes must name at least one size")
        if self.repetitions < 1 or self.servers < 1 or not self.seconds > 0 or not 0 <= self.late <= MOST_LATE_S:
            raise UsageError(
                f"--repetitions and --servers must be at least 1, --seconds positive, --late from 0 to {MOST_LATE_S}"
            )

    def names(self) -> list[str]:
        """Of the backends to measure."""
        if self.backends is not None:
            named = self.backends.split(",")
        else:
            named = [name for name in self._possible if not is_encrypted(name)]
        if self.tls:
            named = [each for name in named for each in (name, over_tls(name)) if each]
        return list(dict.fromkeys(named))

    @property
    def _possible(self) -> tuple[str, ...]:
        return possible(self.op, emulated=self.cluster.hosts is not None)

    @property
    def bytes(self) -> list[int]:
        return [size_in_bytes(size) for size in self.sizes.split(",")]
