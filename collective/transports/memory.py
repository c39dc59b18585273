"""The transport between threads of one process: for tests, and to see the algorithms without any system below."""

from __future__ import annotations

import queue
import time
from typing import TypeVar

from collective.transports.base import Array, Tag, Transport
from common.errors import LayoutMismatch, PeerLost, PeerStalled, error_from_name

__all__ = ["MemoryTransport", "make_memory_ring"]

POLL_S = 0.02
T = TypeVar("T")


class Edge:
    """From one rank to the next: messages one way, their release the other."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[tuple[Tag, Array]] = queue.SimpleQueue()
        self.released: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.reason: str | None = None  # why the sender left, once it has


class MemoryTransport(Transport):
    """Passes references: what is received is the sender's own array."""

    name = "memory"

    def __init__(self, rank: int, edges: list[Edge], *, timeout: float) -> None:
        self.rank, self.nranks, self.timeout = rank, len(edges), timeout
        self._edges = edges
        self._out, self._in = edges[rank], edges[self.left]
        self._under_way = 0
        self._borrowed = False

    def send(self, array: Array, tag: Tag) -> None:
        self._out.messages.put((tag, array))
        self._under_way += 1

    def receive(self, like: Array, tag: Tag) -> Array:
        self._release()
        got, array = self._get(self._in.messages, self.left, "waiting for data")
        tag.check(got, self.left)
        tag.check_size(array.nbytes, like.nbytes, self.left)
        self._borrowed = True
        return array

    def flush(self) -> None:
        self._release()
        while self._under_way:
            self._get(self._out.released, self.right, "waiting for its data to be read")
            self._under_way -= 1

    def close(self, reason: str = "") -> None:
        self._release()
        if self._out.reason is None:
            self._out.reason = reason

    def _release(self) -> None:
        if self._borrowed:
            self._in.released.put(None)
            self._borrowed = False

    def _get(self, source: queue.SimpleQueue[T], peer: int, doing: str) -> T:
        deadline = time.monotonic() + self.timeout
        while True:
            had_left = self._edges[peer].reason is not None  # what it sent before it left counts
            try:
                return source.get(timeout=0 if had_left else POLL_S)
            except queue.Empty:
                self._check(peer if had_left else None)
            if time.monotonic() > deadline:
                raise PeerStalled(f"rank {peer} did not take part for {self.timeout:g} s ({doing})")

    def _check(self, needed: int | None) -> None:
        followed = None  # a failure that only followed another one: it tells that one's text
        for rank, edge in enumerate(self._edges):
            kind, _, text = (edge.reason or "").partition(": ")
            if kind in (PeerLost.__name__, PeerStalled.__name__, LayoutMismatch.__name__):
                followed = error_from_name(kind, text)
            elif kind:
                raise PeerLost(f"rank {rank} left with {edge.reason}")
        if followed:
            raise followed
        if needed is not None and self._edges[needed].reason is not None:
            raise PeerLost(f"rank {needed} finished while rank {self.rank} still needed it")


def make_memory_ring(nranks: int, *, timeout: float = 30.0) -> list[MemoryTransport]:
    """The transports of all ranks, one for each thread."""
    edges = [Edge() for _ in range(nranks)]
    return [MemoryTransport(rank, edges, timeout=timeout) for rank in range(nranks)]
