"""sweep.json: one operation over sizes and numbers of ranks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from benchmarks.records.results import Cluster, Count, Interval, NonNegative, Positive, Results
from benchmarks.stats.interval import Measured

__all__ = ["Row", "ServerMemory", "SweepResults", "Waiting"]


class ServerMemory(Struct, frozen=True):
    """Of a server above that after imports, in MB: PSS, its own part of that, and the most that there may be."""

    pss: float
    own: float
    limit: float


class Row(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One backend at one size; bandwidths as nccl-tests defines them.

    Args:
        bytes: of the array on each rank.
        time_ms: the median over rounds, with its interval and the rounds' values.
        of_limit: the least time there can be / this time; None if the former is not known.
        wrong: elements.
        server_memory: at the largest size.
    """

    backend: str
    nranks: Count
    bytes: Count
    time_ms: Positive
    time_ms_interval: Interval
    time_ms_rounds: list[Positive] = []
    algbw_gb_s: float
    busbw_gb_s: float
    of_limit: float | None
    wrong: Annotated[int, Meta(ge=0)]
    server_memory: ServerMemory | None = None

    @property
    def time(self) -> Measured:
        """In milliseconds."""
        return Measured(self.time_ms, *self.time_ms_interval, tuple(self.time_ms_rounds))


class Waiting(Struct, frozen=True):
    """The largest share of a core that a rank used while it waited for the last one."""

    backend: str
    nranks: Annotated[int, Meta(ge=2)]
    late_s: Positive
    core: NonNegative


class SweepResults(Results, frozen=True, kw_only=True, tag="sweep"):
    """
    Args:
        servers: of push_pull; elsewhere 0.
        interrupted: whether rounds that were asked for are missing.
        absent, failed: other libraries, and why; the latter with the number of ranks.
    """

    op: str
    cluster: Cluster | None
    servers: Annotated[int, Meta(ge=0)] = 0
    interrupted: bool = False
    absent: dict[str, str]
    failed: dict[str, str]
    rows: list[Row]
    waiting: list[Waiting] = field(default_factory=list)
