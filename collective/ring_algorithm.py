"""The ring: every rank talks to its two neighbours only, in the steps of collective/ring.py, over any transport."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from collective.algorithm import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    GATHER_CHUNKS,
    OPERATIONS,
    REDUCE_SCATTER,
    Algorithm,
    Label,
)
from collective.ring import all_gather_steps, reduce_scatter_steps
from collective.transport import SEGMENT_BYTES, Array, Tag, Transport
from common.buckets import chunk_bounds, segments
from common.reduction import Reduction

__all__ = ["RingAlgorithm"]

GATHERING = 5  # the second half of an all-reduce; beyond the operations' own numbers


class RingAlgorithm(Algorithm):
    """Moves chunks in segments of at most SEGMENT_BYTES, so that one is added while the next is on its way.

    An all-reduce sends and receives 2(N-1)/N of the array on every rank, a reduce-scatter or all-gather half of it.
    """

    name = "ring"

    def __init__(self, transport: Transport) -> None:
        self.rank, self.nranks = transport.rank, transport.nranks
        self.transport = transport

    def empty(self, count: int, dtype: npt.DTypeLike) -> Array:
        return self.transport.empty(count, dtype)

    def all_reduce(self, flat: Array, reduction: Reduction, label: Label) -> None:
        kind = OPERATIONS * reduction.number
        self._reduce_scatter(flat, reduction, label, ALL_REDUCE + kind)
        chunks = [flat[a:b] for a, b in chunk_bounds(flat.size, self.nranks)]
        self._all_gather(chunks, label, GATHERING + kind)

    def reduce_scatter(self, flat: Array, reduction: Reduction, label: Label) -> None:
        self._reduce_scatter(flat, reduction, label, REDUCE_SCATTER + OPERATIONS * reduction.number)
        self.transport.flush()

    def all_gather(self, rows: Array, label: Label) -> None:
        self._all_gather(list(rows), label, ALL_GATHER + OPERATIONS * rows.dtype.num)

    def gather_chunks(self, flat: Array, label: Label) -> None:
        chunks = [flat[a:b] for a, b in chunk_bounds(flat.size, self.nranks)]
        self._all_gather(chunks, label, GATHER_CHUNKS + OPERATIONS * flat.dtype.num)

    def broadcast(self, flat: Array, root: int, label: Label) -> None:
        for k, part in enumerate(cut(flat)):
            tag = Tag(*label, BROADCAST + OPERATIONS * flat.dtype.num, root, k)
            if self.rank != root:
                self.transport.receive_into(part, tag)
            if (self.rank + 1) % self.nranks != root:
                self.transport.send(part, tag)
        self.transport.flush()

    def barrier(self, label: Label) -> None:
        self.all_gather(np.zeros((self.nranks, 1), np.uint8), label)

    def close(self, reason: str = "") -> None:
        self.transport.close(reason)

    def _reduce_scatter(self, flat: Array, reduction: Reduction, label: Label, phase: int) -> None:
        """Send one chunk of partial results on and combine another, which arrives, with one's own; N-1 times."""
        partial = flat.astype(reduction.partial) if reduction.widens else flat
        bounds = chunk_bounds(flat.size, self.nranks)
        for i, (send, receive) in enumerate(reduce_scatter_steps(self.rank, self.nranks)):
            outgoing, incoming = cut(partial[slice(*bounds[send])]), cut(partial[slice(*bounds[receive])])
            for k, (leaving, own) in enumerate(zip_longest(outgoing, incoming)):
                tag = Tag(*label, phase, i, k)
                if leaving is not None:
                    self.transport.send(leaving, tag)
                if own is not None:
                    reduction.combine(self.transport.receive(own, tag), own, out=own)
                    if reduction.scale is not None and i == self.nranks - 2:
                        np.multiply(own, reduction.scale, out=own)
        if reduction.widens:
            mine = slice(*bounds[self.rank])
            flat[mine] = partial[mine]

    def _all_gather(self, chunks: list[Array], label: Label, phase: int) -> None:
        """Send one complete chunk on and replace another by what arrives; N-1 times."""
        for i, (send, receive) in enumerate(all_gather_steps(self.rank, self.nranks)):
            for k, (leaving, arriving) in enumerate(zip_longest(cut(chunks[send]), cut(chunks[receive]))):
                tag = Tag(*label, phase, i, k)
                if leaving is not None:
                    self.transport.send(leaving, tag)
                if arriving is not None:
                    self.transport.receive_into(arriving, tag)
        self.transport.flush()


def cut(flat: Array) -> Iterator[Array]:
    """The array in segments of at most SEGMENT_BYTES; an empty one as it is, for its tag must be compared too."""
    if not flat.size:
        yield flat
    for a, b in segments(0, flat.size, SEGMENT_BYTES // flat.itemsize):
        yield flat[a:b]
