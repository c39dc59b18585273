"""The direct algorithm over TCP: short arrays go straight to the ranks that reduce them, long ones round the ring.

    reduce-scatter   rank r sends its values of chunk c to rank c, which adds them in canonical order
    all-gather       rank c sends the complete chunk c to everyone

As many bytes as in a ring, in 2 hops instead of 2(N-1); but every rank talks to all others at the same time, and what
it receives stays in the cache only if it is short.
"""

from __future__ import annotations

import numpy as np

from collective.algorithms.base import ALL_GATHER, ALL_REDUCE, GATHER_CHUNKS, OPERATIONS, REDUCE_SCATTER, Label
from collective.algorithms.ring import GATHERING, RingAlgorithm
from collective.transports.base import Array, Tag
from collective.transports.tcp import TcpTransport
from common.tensors.reduction import Reduction, canonical_ranks

__all__ = ["SHORT_BYTES", "ExchangeAlgorithm"]

SHORT_BYTES = 4 << 20  # divided by N: 1 MiB at N=4; measured, docs/performance.md
MARK = 2**32 - 1  # in place of a piece's number: a rank that takes the ring is told from one that does not


class ExchangeAlgorithm(RingAlgorithm):
    name = "direct"
    transport: TcpTransport

    def __init__(self, transport: TcpTransport) -> None:
        super().__init__(transport)
        self._links = transport.links
        self._short_bytes = SHORT_BYTES // self.nranks
        self._others = canonical_ranks(self.rank, self.nranks)[:-1]  # chunk `rank` is summed in this order, then here
        self._arrived = np.empty(self._short_bytes + 128 * self.nranks, np.uint8)  # chunks may be a cache line longer

    def all_reduce(self, flat: Array, reduction: Reduction, label: Label) -> None:
        if flat.nbytes > self._short_bytes:
            super().all_reduce(flat, reduction, label)
            return
        kind = OPERATIONS * reduction.number
        chunks = self._chunks(flat)
        self._scatter(chunks, reduction, label, ALL_REDUCE + kind)
        self._share(chunks, label, GATHERING + kind)

    def reduce_scatter(self, flat: Array, reduction: Reduction, label: Label) -> None:
        if flat.nbytes > self._short_bytes:
            super().reduce_scatter(flat, reduction, label)
            return
        self._scatter(self._chunks(flat), reduction, label, REDUCE_SCATTER + OPERATIONS * reduction.number)
        self._links.flush()

    def all_gather(self, rows: Array, label: Label) -> None:
        if rows.nbytes > self._short_bytes:
            super().all_gather(rows, label)
        else:
            self._share(list(rows), label, ALL_GATHER + OPERATIONS * rows.dtype.num)

    def gather_chunks(self, flat: Array, label: Label) -> None:
        if flat.nbytes > self._short_bytes:
            super().gather_chunks(flat, label)
        else:
            self._share(self._chunks(flat), label, GATHER_CHUNKS + OPERATIONS * flat.dtype.num)

    def _scatter(self, chunks: list[Array], reduction: Reduction, label: Label, phase: int) -> None:
        """Send the others their chunks, and complete one's own."""
        for rank in self._others:
            self._links.send(rank, chunks[rank], Tag(*label, phase, rank, MARK))
        own = chunks[self.rank]
        space = self._arrived[: len(self._others) * own.nbytes].view(own.dtype)
        arrived = list(space.reshape(len(self._others), own.size))
        for rank, values in zip(self._others, arrived, strict=True):
            self._links.receive(rank, values, Tag(*label, phase, self.rank, MARK))
        scratch = np.empty(own.size if reduction.widens else 0, reduction.partial)
        reduction.reduce([*arrived, own], (arrived[0], own), scratch)

    def _share(self, chunks: list[Array], label: Label, phase: int) -> None:
        """Send one's own chunk to all, and replace the others by theirs."""
        for rank in self._others:
            self._links.send(rank, chunks[self.rank], Tag(*label, phase, self.rank, MARK))
        for rank in self._others:
            self._links.receive(rank, chunks[rank], Tag(*label, phase, rank, MARK))
        self._links.flush()
