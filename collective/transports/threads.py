"""The transport between threads of one process: for a group of one rank, and to test algorithms without a system."""

from __future__ import annotations

import queue
import time
from typing import TypeVar

import numpy as np

from collective.call_tags import Array, Tag
from collective.transports.base import Transport
from common.errors import LayoutMismatch, NonFiniteGradient, PeerLost, PeerStalled, error_from_name

__all__ = ["MemoryTransport", "connect_threads"]

POLL_S = 0.02
FOLLOWED = tuple(kind.__name__ for kind in (PeerLost, PeerStalled, LayoutMismatch, NonFiniteGradient))
T = TypeVar("T")


class Edge:
    """From one rank to another: messages one way, their release the other."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[tuple[Tag, Array]] = queue.SimpleQueue()
        self.released: queue.SimpleQueue[None] = queue.SimpleQueue()


class Meeting:
    """What the threads' transports have together."""

    def __init__(self, nranks: int) -> None:
        self.edges = {(a, b): Edge() for a in range(nranks) for b in range(nranks) if a != b}
        self.reasons: list[str | None] = [None] * nranks  # why a rank left, once it has


class MemoryTransport(Transport):
    """Passes references; the receiver copies out of the sender's own array."""

    def __init__(self, rank: int, nranks: int, meeting: Meeting, *, timeout: float) -> None:
        self.rank, self.nranks, self.timeout = rank, nranks, timeout
        self._edges, self._reasons = meeting.edges, meeting.reasons
        self._under_way = [0] * nranks  # messages to each rank

    def send(self, rank: int, array: Array, tag: Tag) -> None:
        self._edges[self.rank, rank].messages.put((tag, array))
        self._under_way[rank] += 1

    def receive(self, rank: int, out: Array, tag: Tag) -> None:
        edge = self._edges[rank, self.rank]
        got, array = self._get(edge.messages, rank, "waiting for data")
        tag.check(got, rank)
        tag.check_size(array.nbytes, out.nbytes, rank)
        np.copyto(out, array)
        edge.released.put(None)

    def flush(self) -> None:
        for rank in range(self.nranks):
            while self._under_way[rank]:
                self._get(self._edges[self.rank, rank].released, rank, "waiting for its data to be read")
                self._under_way[rank] -= 1

    def close(self, reason: str = "") -> None:
        if self._reasons[self.rank] is None:
            self._reasons[self.rank] = reason

    def _get(self, source: queue.SimpleQueue[T], rank: int, doing: str) -> T:
        deadline = time.monotonic() + self.timeout
        while True:
            had_left = self._reasons[rank] is not None  # what it sent before it left counts
            try:
                return source.get(timeout=0 if had_left else POLL_S)
            except queue.Empty:
                self._check(rank if had_left else None)
            if time.monotonic() > deadline:
                raise PeerStalled(f"rank {rank} did not take part for {self.timeout:g} s ({doing})")

    def _check(self, needed: int | None) -> None:
        followed = None  # a failure that only followed another one: it tells that one's text
        for rank, reason in enumerate(self._reasons):
            kind, _, text = (reason or "").partition(": ")
            if kind in FOLLOWED:
                followed = error_from_name(kind, text)
            elif kind:
                raise PeerLost(f"rank {rank} left with {reason}")
        if followed:
            raise followed
        if needed is not None and self._reasons[needed] is not None:
            raise PeerLost(f"rank {needed} finished while rank {self.rank} still needed it")


def connect_threads(nranks: int, *, timeout: float = 30.0) -> list[MemoryTransport]:
    """The transports of all ranks, one for each thread."""
    meeting = Meeting(nranks)
    return [MemoryTransport(rank, nranks, meeting, timeout=timeout) for rank in range(nranks)]
