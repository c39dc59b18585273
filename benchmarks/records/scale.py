"""scale.json: large groups on one machine, and what groups of any size do at their start."""

from __future__ import annotations

from msgspec import Struct

from benchmarks.records.results import Count, NonNegative, Results

__all__ = ["AtStart", "GroupScale", "ScaleResults"]

Held = list[int]  # by ranks besides rank 0, median and most; by rank 0


class GroupScale(Struct, frozen=True, kw_only=True):
    """A group that was started.

    Args:
        complete_s: from the moment that all ranks, which had imported, were let in, until the last had joined.
        named: of the other ranks, how many named the one that was killed.
        named_s: the last of them, from the kill on.
    """

    nranks: Count
    backend: str
    complete_s: NonNegative
    sockets: Held
    descriptors: Held
    threads: Held
    named: int
    named_s: NonNegative


class AtStart(Struct, frozen=True, kw_only=True):
    """Counted, not measured.

    Args:
        joins: calls that rank 0 answers; reply_bytes: of each answer.
        connections_shm, connections_tcp: that a rank opens or accepts.
        all_with_all: the same over TCP if each were connected with each.
        steps: in which a word from one rank reaches all.
        passed_on: to how many ranks one passes a segment of shared memory on, at most.
    """

    nranks: Count
    joins: int
    reply_bytes: int
    connections_shm: int
    connections_tcp: int
    all_with_all: int
    steps: int
    passed_on: int


class ScaleResults(Results, frozen=True, kw_only=True, tag="scale"):
    groups: list[GroupScale]
    at_start: list[AtStart]
