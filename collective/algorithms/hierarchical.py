"""Several ranks on each of several hosts: shared memory inside a host, TCP between hosts, the canonical order kept.

With L ranks on each of H hosts, numbered host by host, the ranks with index i in their hosts work together on the
chunks with c mod L = i: every rank of a host has its own part of the link, and its own part of the additions. Chunk c
belongs to host h = c div L. Its sum begins at rank c+1 and goes from host to host; each adds its ranks' values, read
where they lie, onto what arrives:

    host h          ranks c+1 .. the last one of h (none if c is the last)
    host h+1, ...   all its ranks, in order
    host h          its first rank .. c: complete; written into the arrays of all its ranks
    host h+1, ...   the complete chunk, likewise

So a host sends (N-1)/N + (H-1)/H of the array, where a ring sends 2(N-1)/N, and nothing inside a host is sent at all.

Every call begins and ends with a meeting of the host's ranks (collective/shared_memory/barrier.py). An array that is
not from `empty`, or whose partial sums are wider, is copied into shared memory and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from collective.algorithm import Algorithm
from collective.algorithms.schedule import pipeline
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
from collective.shared_memory.agree import ELSEWHERE, agree, array_at, place_of
from collective.shared_memory.barrier import SharedMemoryBarrier
from collective.transports.base import Transport
from common.tensors.buckets import chunk_bounds
from common.tensors.reduction import Reduction

__all__ = ["HierarchicalAlgorithm", "neighbours", "ranks_each"]

PIECE_BYTES = 256 * 1024  # of a chunk; it and the values of a host's ranks stay in L2 while they are added
Parts = list[list[Array]]  # [chunk][rank of this host] -> its elements in that rank's array


@dataclass(frozen=True)
class Step:
    """What this rank does at one step with every piece."""

    phase: int
    number: int
    leaving: Callable[[slice], Array] | None  # makes the piece that is sent on; None: nothing is
    arriving: Callable[[slice, Tag], None]  # receives one


def ranks_each(hosts: Sequence[str]) -> int:
    """How many ranks each host has, given every rank's host; 0 if they differ, if there is but one host, or if ranks
    are not numbered host by host.

    >>> ranks_each(["a", "a", "b", "b"]), ranks_each(["a", "b", "a", "b"]), ranks_each(["a", "a", "b"])
    (2, 0, 0)
    """
    each = hosts.count(hosts[0])
    fits = list(hosts) == [host for host in dict.fromkeys(hosts) for _ in range(each)]
    return each if fits and each < len(hosts) else 0


def neighbours(rank: int, nranks: int, each: int) -> tuple[int, int]:
    """The ranks with the same index on the next host and on the one before."""
    return (rank + each) % nranks, (rank - each) % nranks


class HierarchicalAlgorithm(Algorithm):
    name = "hierarchical"

    def __init__(self, barrier: SharedMemoryBarrier, transport: Transport) -> None:
        self.rank, self.nranks = transport.rank, transport.nranks
        self._barrier, self._transport = barrier, transport
        self._each, self._index = barrier.nranks, barrier.rank
        self._hosts, self._host = self.nranks // self._each, self.rank // self._each
        self._next, self._previous = neighbours(self.rank, self.nranks, self._each)
        self._arrived = np.empty(PIECE_BYTES, np.uint8)
        self._staging = self.empty(0, np.uint8)

    def empty(self, count: int, dtype: npt.DTypeLike) -> Array:
        return self._barrier.empty(count, dtype)

    def all_reduce(self, flat: Array, reduction: Reduction, label: Label) -> None:
        self._reduce(flat, reduction, label, ALL_REDUCE, gathers=True)

    def reduce_scatter(self, flat: Array, reduction: Reduction, label: Label) -> None:
        self._reduce(flat, reduction, label, REDUCE_SCATTER, gathers=False)

    def all_gather(self, rows: Array, label: Label) -> None:
        count = rows[0].size
        bounds = [(r * count, (r + 1) * count) for r in range(self.nranks)]
        self._gather(rows.reshape(-1), bounds, label, ALL_GATHER)

    def gather_chunks(self, flat: Array, label: Label) -> None:
        self._gather(flat, chunk_bounds(flat.size, self.nranks), label, GATHER_CHUNKS)

    def broadcast(self, flat: Array, root: int, label: Label) -> None:
        """Each of a host's ranks passes on its own part of the array."""
        phase = BROADCAST + OPERATIONS * flat.dtype.num
        shared = self._place(flat, flat.dtype)
        arrays = self._meet(flat, shared, label, phase, root)
        host, index = divmod(root, self._each)
        source = index if self._host == host else 0
        parts = [array[slice(*chunk_bounds(flat.size, self._each)[self._index])] for array in arrays]
        length = PIECE_BYTES // flat.itemsize
        for k, at in enumerate(range(0, max(1, parts[0].size), length)):
            piece, tag = parts[source][at : at + length], Tag(*label, phase, root, k)
            if self._host != host:
                self._transport.receive(self._previous, piece, tag)
            if (self._host + 1) % self._hosts != host:
                self._transport.send(self._next, piece, tag)
        spread(parts, source)
        self._leave(flat, shared)

    def close(self, reason: str = "") -> None:
        self._transport.close(reason)
        self._barrier.close(reason)

    # Meetings of the host's ranks

    def _place(self, flat: Array, dtype: npt.DTypeLike) -> Array:
        """The array itself if the host's ranks can reach it and it is of that dtype, else a copy that they can."""
        if flat.dtype == dtype and place_of(self._barrier, flat) != ELSEWHERE:
            return flat
        nbytes = flat.size * np.dtype(dtype).itemsize
        if self._staging.size < nbytes or not nbytes:
            self._staging = self.empty(max(1, nbytes), np.uint8)
        copy = self._staging[:nbytes].view(dtype)
        copy[...] = flat
        return copy

    def _meet(self, flat: Array, shared: Array, label: Label, phase: int, root: int = 0) -> list[Array]:
        """Compare what the host's ranks are about to do; returns their arrays."""
        place = place_of(self._barrier, shared)
        places = agree(self._barrier, label, phase, flat.nbytes, root=root, place=place)
        return [
            shared if index == self._index or place == ELSEWHERE else array_at(self._barrier, index, there, shared)
            for index, there in enumerate(places)
        ]

    def _leave(self, flat: Array, shared: Array) -> None:
        """Wait until the host's ranks have done with each other's arrays."""
        self._transport.flush()
        self._barrier.meet()
        if shared is not flat:
            flat[...] = shared

    # The ring of hosts

    def _reduce(self, flat: Array, reduction: Reduction, label: Label, operation: int, *, gathers: bool) -> None:
        kind = OPERATIONS * reduction.number
        shared = self._place(flat, reduction.partial)
        arrays = self._meet(flat, shared, label, operation + kind)
        parts = [[array[a:b] for array in arrays] for a, b in chunk_bounds(flat.size, self.nranks)]
        steps = self._reducing(parts, reduction, operation + kind, to_all=gathers)
        steps += self._gathering(parts, GATHERING + kind) if gathers else []
        self._travel(steps, longest_of(parts), label)
        self._leave(flat, shared)

    def _gather(self, flat: Array, bounds: Sequence[tuple[int, int]], label: Label, operation: int) -> None:
        phase = operation + OPERATIONS * flat.dtype.num
        shared = self._place(flat, flat.dtype)
        arrays = self._meet(flat, shared, label, phase)
        parts = [[array[a:b] for array in arrays] for a, b in bounds]
        spread(parts[self.rank], self._index)
        self._travel(self._gathering(parts, phase), longest_of(parts), label)
        self._leave(flat, shared)

    def _reducing(self, parts: Parts, reduction: Reduction, phase: int, *, to_all: bool) -> list[Step]:
        """A chunk's partial sum lies in the array of the first rank whose values this host adds."""
        complete = replace(reduction, widens=False)  # the arrays here are as wide as partial sums
        unfinished = replace(complete, scale=None)
        last, steps = self._hosts - 1, []
        for i in range(self._hosts):
            begun, own = parts[self._chunk(i)], parts[self._chunk(i + 1)]
            tail = begun[self._index + 1 :] if i == 0 else begun[:1]
            leaving = partial(self._begin, unfinished, tail) if tail else None
            arrives = i > 0 or leaving is not None
            if i < last:
                arriving = partial(self._add, unfinished, own, own[:1], arrives)
            else:
                results = own if to_all else [own[0], own[self._index]]
                arriving = partial(self._add, complete, own[: self._index + 1], results, arrives)
            steps.append(Step(phase, i, leaving, arriving))
        return steps

    def _gathering(self, parts: Parts, phase: int) -> list[Step]:
        return [
            Step(phase, i, parts[self._chunk(i)][0].__getitem__, partial(self._replace, parts[self._chunk(i + 1)]))
            for i in range(self._hosts - 1)
        ]

    def _chunk(self, back: int) -> int:
        """This rank's share of the chunks of the host that is so many places back."""
        return (self._host - back) % self._hosts * self._each + self._index

    def _travel(self, steps: Sequence[Step], longest: Array, label: Label) -> None:
        """Take this rank's share of the chunks through all steps, piece by piece."""
        length = PIECE_BYTES // longest.itemsize
        for under_way in pipeline(len(steps), max(1, -(-longest.size // length))):
            jobs = [
                (steps[i], slice(k * length, (k + 1) * length), Tag(*label, steps[i].phase, steps[i].number, k))
                for i, k in under_way
            ]
            for step, piece, tag in jobs:
                if step.leaving is not None:
                    self._transport.send(self._next, step.leaving(piece), tag)
            for step, piece, tag in jobs:
                step.arriving(piece, tag)

    def _begin(self, reduction: Reduction, values: list[Array], piece: slice) -> Array:
        """What begins here of a chunk's sum, or has come this far."""
        inputs = [array[piece] for array in values]
        if len(inputs) > 1:
            reduction.reduce(inputs, inputs[:1])
        return inputs[0]

    def _add(
        self, reduction: Reduction, values: list[Array], results: list[Array], arrives: bool, piece: slice, tag: Tag
    ) -> None:
        """Add the values of this host's ranks onto what arrives."""
        inputs = [array[piece] for array in values]
        if arrives:
            incoming: Array = self._arrived[: inputs[0].nbytes].view(inputs[0].dtype)
            self._transport.receive(self._previous, incoming, tag)
            inputs.insert(0, incoming)
        if len(inputs) > 1:  # else one rank's own values begin the sum, where they lie
            reduction.reduce(inputs, [array[piece] for array in results])

    def _replace(self, arrays: list[Array], piece: slice, tag: Tag) -> None:
        """Write the complete chunk that arrives into the arrays of all this host's ranks."""
        self._transport.receive(self._previous, arrays[0][piece], tag)
        spread([array[piece] for array in arrays], 0)


def spread(arrays: Sequence[Array], source: int) -> None:
    """Copy one of the arrays into all others."""
    for index, array in enumerate(arrays):
        if index != source:
            array[...] = arrays[source]


def longest_of(parts: Parts) -> Array:
    return max((arrays[0] for arrays in parts), key=len)
