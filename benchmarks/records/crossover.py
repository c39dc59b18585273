"""crossover.json: which scheme wins, by size, link, ranks and servers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from benchmarks.records.results import Count, Interval, Positive, Results
from benchmarks.stats.interval import Measured

__all__ = ["Cell", "CrossoverResults", "Time"]


class Time(Struct, frozen=True, kw_only=True):
    """Of a step: the median over rounds, its range and the rounds' values; the least there can be, and how near."""

    time_ms: Positive
    time_ms_interval: Interval
    time_ms_rounds: list[Positive] = []
    bound_ms: Positive
    of_bound: Positive

    @property
    def time(self) -> Measured:
        """In milliseconds."""
        return Measured(self.time_ms, *self.time_ms_interval, tuple(self.time_ms_rounds))


class Cell(Struct, frozen=True, kw_only=True):
    """The ring against so many servers, at one size on one link.

    Args:
        stream_bytes_per_s: what a plain stream carried.
        apart: whether the servers had hosts of their own; else they shared the ranks'.
        bytes: of the model.
        ratio: the ring's time / the servers'.
    """

    link: str
    link_bytes_per_s: Positive
    stream_bytes_per_s: Positive
    stream_bytes_per_s_interval: Interval
    nranks: Annotated[int, Meta(ge=2)]
    servers: Count
    apart: bool = False
    bytes: Annotated[int, Meta(ge=4)]
    ring: Time
    ps: Time
    ratio: Positive
    rounds: int = 0


class CrossoverResults(Results, frozen=True, kw_only=True, tag="crossover"):
    """
    Args:
        repetitions: whole rounds of every cell.
        interrupted: whether rounds that were asked for are missing.
    """

    congestion_control: str
    repetitions: Count
    interrupted: bool
    cells: list[Cell]
