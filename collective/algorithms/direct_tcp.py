"""Direct, over TCP: values go straight to the rank that reduces them, and results straight to everyone.

    reduce-scatter   rank r sends its values of chunk c to rank c, which adds them in canonical order
    all-gather       rank c sends the complete chunk c to everyone

As many bytes as in a ring, in 2 hops instead of 2(N-1); but every rank talks to all others at the same time, and what
it receives stays in the cache only if it is short: see by_size.py.
"""

from __future__ import annotations

import numpy as np

from collective.calls import (
    ALL_GATHER,
    ALL_REDUCE,
    GATHER_CHUNKS,
    GATHERING,
    OPERATIONS,
    REDUCE_SCATTER,
    Array,
    Label,
    Tag,
)
from collective.transports.base import Transport
from common.tensors.buckets import chunk_bounds
from common.tensors.reduction import Reduction, canonical_ranks

__all__ = ["DirectTcp"]

MARK = 2**32 - 1  # in place of a piece's number: a rank that takes the ring is told from one that does not


class DirectTcp:
    """The calls of an Algorithm that gain by it. Arrays are of at most `most_bytes`."""

    def __init__(self, transport: Transport, most_bytes: int) -> None:
        self.rank, self.nranks = transport.rank, transport.nranks
        self._transport = transport
        self._others = canonical_ranks(self.rank, self.nranks)[:-1]  # chunk `rank` is summed in this order, then here
        self._arrived = np.empty(most_bytes + 128 * self.nranks, np.uint8)  # chunks may be a cache line longer

    def all_reduce(self, flat: Array, reduction: Reduction, label: Label) -> None:
        kind = OPERATIONS * reduction.number
        chunks = self._chunks(flat)
        self._reduce_own(chunks, reduction, label, ALL_REDUCE + kind)
        self._send_own(chunks, label, GATHERING + kind)

    def reduce_scatter(self, flat: Array, reduction: Reduction, label: Label) -> None:
        self._reduce_own(self._chunks(flat), reduction, label, REDUCE_SCATTER + OPERATIONS * reduction.number)
        self._transport.flush()

    def all_gather(self, rows: Array, label: Label) -> None:
        self._send_own(list(rows), label, ALL_GATHER + OPERATIONS * rows.dtype.num)

    def gather_chunks(self, flat: Array, label: Label) -> None:
        self._send_own(self._chunks(flat), label, GATHER_CHUNKS + OPERATIONS * flat.dtype.num)

    def _chunks(self, flat: Array) -> list[Array]:
        return [flat[a:b] for a, b in chunk_bounds(flat.size, self.nranks)]

    def _reduce_own(self, chunks: list[Array], reduction: Reduction, label: Label, phase: int) -> None:
        """Send the others their chunks, and complete one's own."""
        for rank in self._others:
            self._transport.send(rank, chunks[rank], Tag(*label, phase, rank, MARK))
        own = chunks[self.rank]
        space = self._arrived[: len(self._others) * own.nbytes].view(own.dtype)
        arrived = list(space.reshape(len(self._others), own.size))
        for rank, values in zip(self._others, arrived, strict=True):
            self._transport.receive(rank, values, Tag(*label, phase, self.rank, MARK))
        reduction.reduce([*arrived, own], (own,))

    def _send_own(self, chunks: list[Array], label: Label, phase: int) -> None:
        """Send one's own chunk to all, and replace the others by theirs."""
        for rank in self._others:
            self._transport.send(rank, chunks[self.rank], Tag(*label, phase, self.rank, MARK))
        for rank in self._others:
            self._transport.receive(rank, chunks[rank], Tag(*label, phase, rank, MARK))
        self._transport.flush()
