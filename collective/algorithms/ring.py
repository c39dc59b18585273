"""The ring: every rank talks to its two neighbours only, in the steps of schedule.py, over any transport."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from collective.algorithm import Algorithm
from collective.algorithms.schedule import all_gather_steps, pipeline, reduce_scatter_steps
from collective.call_tags import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
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
from common.tensors.reduction import Reduction

__all__ = ["RingAlgorithm"]

BURST = 8  # messages sent before as many are received: a rank that is a little late holds nobody up


@dataclass(frozen=True)
class Step:
    """What a rank does at one step of a schedule, with every piece of two chunks."""

    phase: int
    number: int
    leaving: Array
    arriving: Array  # combined with what arrives, or replaced by it
    reduction: Reduction | None = None
    result: Array | None = None  # where the chunk goes that this step completes


class RingAlgorithm(Algorithm):
    """Moves chunks in pieces of at most the transport's `piece_bytes`, all steps of the schedule side by side: what
    has come is added and sent on from the cache.

    An all-reduce sends and receives 2(N-1)/N of the array on every rank, a reduce-scatter or all-gather half of it.
    """

    name = "ring"

    def __init__(self, transport: Transport) -> None:
        self.rank, self.nranks = transport.rank, transport.nranks
        self.transport = transport
        self._next, self._previous = (self.rank + 1) % self.nranks, (self.rank - 1) % self.nranks
        self._arrived = np.empty(transport.piece_bytes, np.uint8)

    def empty(self, count: int, dtype: npt.DTypeLike) -> Array:
        return self.transport.empty(count, dtype)

    def all_reduce(self, flat: Array, reduction: Reduction, label: Label) -> None:
        self._reduce(flat, reduction, label, ALL_REDUCE, gathers=True)

    def reduce_scatter(self, flat: Array, reduction: Reduction, label: Label) -> None:
        self._reduce(flat, reduction, label, REDUCE_SCATTER, gathers=False)

    def all_gather(self, rows: Array, label: Label) -> None:
        self._gather(list(rows), label, ALL_GATHER)

    def gather_chunks(self, flat: Array, label: Label) -> None:
        self._gather(self._chunks(flat), label, GATHER_CHUNKS)

    def broadcast(self, flat: Array, root: int, label: Label) -> None:
        for number, piece in enumerate(self._pieces(flat)):
            tag = Tag(*label, BROADCAST + OPERATIONS * flat.dtype.num, root, number)
            if self.rank != root:
                self.transport.receive(self._previous, piece, tag)
            if self._next != root:
                self.transport.send(self._next, piece, tag)
        self.transport.flush()

    def close(self, reason: str = "") -> None:
        self.transport.close(reason)

    def _chunks(self, flat: Array) -> list[Array]:
        return [flat[a:b] for a, b in chunk_bounds(flat.size, self.nranks)]

    def _pieces(self, flat: Array) -> list[Array]:
        """One of an empty array too, for its tag must be compared as well."""
        length = self.transport.piece_bytes // flat.itemsize
        return [flat[at : at + length] for at in range(0, flat.size, length)] or [flat]

    def _reduce(self, flat: Array, reduction: Reduction, label: Label, operation: int, *, gathers: bool) -> None:
        """N-1 times send a chunk of partial results on and combine another, which arrives, with one's own; then, with
        `gathers`, N-1 times send a complete one on and replace another by what arrives."""
        kind = OPERATIONS * reduction.number
        partial = flat.astype(reduction.partial) if reduction.widens else flat
        partials, results = self._chunks(partial), self._chunks(flat)
        steps = [
            Step(operation + kind, i, partials[send], partials[receive], reduction)
            for i, (send, receive) in enumerate(reduce_scatter_steps(self.rank, self.nranks))
        ]
        steps[-1:] = [replace(step, result=results[self.rank]) for step in steps[-1:]]
        self._travel(steps + self._gathering(results, GATHERING + kind) if gathers else steps, label)

    def _gather(self, chunks: list[Array], label: Label, operation: int) -> None:
        self._travel(self._gathering(chunks, operation + OPERATIONS * chunks[0].dtype.num), label)

    def _gathering(self, chunks: list[Array], phase: int) -> list[Step]:
        schedule = all_gather_steps(self.rank, self.nranks)
        return [Step(phase, i, chunks[send], chunks[receive]) for i, (send, receive) in enumerate(schedule)]

    def _travel(self, steps: list[Step], label: Label) -> None:
        """Take the chunks through all steps, piece by piece."""
        widest = max((step.arriving.itemsize for step in steps), default=1)
        length = self.transport.piece_bytes // widest
        longest = max((step.arriving.size for step in steps), default=0)
        for under_way in pipeline(len(steps), max(1, -(-longest // length))):
            for at in range(0, len(under_way), BURST):
                burst = [
                    (steps[i], slice(k * length, (k + 1) * length), Tag(*label, steps[i].phase, steps[i].number, k))
                    for i, k in under_way[at : at + BURST]
                ]
                for step, piece, tag in burst:
                    self.transport.send(self._next, step.leaving[piece], tag)
                for step, piece, tag in burst:
                    self._receive(step, piece, tag)
        self.transport.flush()

    def _receive(self, step: Step, piece: slice, tag: Tag) -> None:
        own, reduction = step.arriving[piece], step.reduction
        if reduction is None:
            self.transport.receive(self._previous, own, tag)
            return
        arrived: Array = self._arrived[: own.nbytes].view(own.dtype)
        self.transport.receive(self._previous, arrived, tag)
        reduction.combine(arrived, own, out=own)
        if step.result is not None:
            if reduction.scale is not None:
                np.multiply(own, reduction.scale, out=own)
            if reduction.widens:
                step.result[piece] = own
