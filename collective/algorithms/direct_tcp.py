"""Direct, over TCP, for short arrays: values go straight to the ranks that need them.

    exchange         very short ones: everyone sends all its values to everyone, and adds them all up itself; 1 hop
    reduce-scatter   rank r sends its values of chunk c to rank c, which adds them in canonical order
    all-gather       rank c sends the complete chunk c to everyone

The last two move as many bytes as a ring, in 2 hops instead of 2(N-1); but every rank talks to all others at the same
time, and what it receives stays in the cache only if it is short: see by_size.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from collective.call_tags import (
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
from collective.plans import remember
from collective.transports.base import Transport
from common.system.memory import aligned_empty
from common.tensors.buckets import chunk_bounds
from common.tensors.canonical_order import canonical_ranks
from common.tensors.reduction import Reduction

__all__ = ["DirectTcp"]

EXCHANGED_BYTES = 16 << 10  # that a rank sends; from there on the hop saved costs more than the bytes
MARK = 2**32 - 1  # in place of a piece's number: a rank that takes the ring is told from one that does not

Plan = tuple[list[Array], list[tuple[slice, Callable[[Array], object]]]]


class DirectTcp:
    """The calls of an Algorithm that gain by it. Arrays are of at most `most_bytes`."""

    def __init__(self, transport: Transport, most_bytes: int) -> None:
        self.rank, self.nranks = transport.rank, transport.nranks
        self._transport = transport
        self._others = canonical_ranks(self.rank, self.nranks)[:-1]  # chunk `rank` is summed in this order, then here
        self._arrived = np.empty(most_bytes + 128 * self.nranks, np.uint8)  # chunks may be a cache line longer
        self._exchanged_bytes = EXCHANGED_BYTES // (self.nranks - 1)
        self._exchanged = aligned_empty(self.nranks * self._exchanged_bytes, np.uint8)
        self._plans: dict[tuple[int, int], Plan] = {}

    def all_reduce(self, flat: Array, reduction: Reduction, label: Label) -> None:
        kind = OPERATIONS * reduction.number
        if flat.nbytes <= self._exchanged_bytes:
            self._exchange(flat, reduction, label, ALL_REDUCE + kind)
            return
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

    def _exchange(self, flat: Array, reduction: Reduction, label: Label, phase: int) -> None:
        plan = self._plans.get((reduction.number, flat.size))
        if plan is None:
            plan = remember(self._plans, (reduction.number, flat.size), self._plan(flat, reduction))
        values, reductions = plan
        own = values[self.rank]
        own[...] = flat  # what is sent must stay as it is until it has been taken
        for rank in self._others:
            self._transport.send(rank, own, Tag(*label, phase, self.rank, MARK))
        for rank in self._others:
            self._transport.receive(rank, values[rank], Tag(*label, phase, rank, MARK))
        for chunk, reduce in reductions:
            reduce(flat[chunk])
        self._transport.flush()

    def _plan(self, flat: Array, reduction: Reduction) -> Plan:
        """Where every rank's values come, and what adds up each chunk of them."""
        rows = self._exchanged[: flat.nbytes * self.nranks].view(flat.dtype).reshape(self.nranks, flat.size)
        chunks = [slice(*bounds) for bounds in chunk_bounds(flat.size, self.nranks)]
        return list(rows), [
            (chunk, reduction.into([rows[rank][chunk] for rank in canonical_ranks(c, self.nranks)]))
            for c, chunk in enumerate(chunks)
            if chunk.start < chunk.stop
        ]

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
