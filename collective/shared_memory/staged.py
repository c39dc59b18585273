"""Arrays that do not all come from `empty`: passed through the barrier's halves, piece by piece.

    copy values in | meet | reduce, post results, copy the next values in | meet | copy results out, ...

A piece is of every chunk the same part; each chunk has a section of the halves. What is not reduced goes there too.
Where meetings are compiled, all of that is one call. Halves are so small that they stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest

import numpy as np

from collective.call_tags import ALL_REDUCE, OPERATIONS, Array, Label
from collective.plans import MAX_PLANS, remember
from collective.shared_memory.agree import ELSEWHERE, agree, array_at, places_of
from collective.shared_memory.barrier import HALF_BYTES, SharedMemoryBarrier
from collective.shared_memory.whole_calls import WholeCall
from common.kernels.layout import DIFFERENT
from common.system.memory import ALIGNMENT_BYTES
from common.tensors.buckets import chunk_bounds, pieces_of
from common.tensors.canonical_order import canonical_ranks
from common.tensors.reduction import Reduction

__all__ = ["StagedCopies", "StagedReduction", "section_bytes"]

PAST_BYTES = 32 << 20  # of an array: results are copied out past the cache, in which they would not stay


def section_bytes(nranks: int) -> int:
    """Of a half, for each chunk."""
    return HALF_BYTES // nranks // ALIGNMENT_BYTES * ALIGNMENT_BYTES


class StagedReduction:
    """Arrays of other ranks that do lie in shared memory are read there even so."""

    def __init__(self, barrier: SharedMemoryBarrier) -> None:
        self._rank, self._nranks = barrier.rank, barrier.nranks
        self._barrier = barrier
        self._others = [r for r in range(self._nranks) if r != self._rank]
        self._order = canonical_ranks(self._rank, self._nranks)
        self._section = section_bytes(self._nranks)
        self._calls: dict[tuple[object, ...], WholeCall] = {}

    def begin(self, flat: Array, reduction: Reduction, label: Label, operation: int) -> Sequence[bytes]:
        """Meet, when this rank's array is not from `empty`; returns where all arrays lie. Nothing if that was already
        the whole reduction."""
        call = self._call(flat, reduction, operation, [ELSEWHERE] * self._nranks)
        if call is not None:
            return places_of(self._barrier, call.notes()) if call.reduce(flat, label) == DIFFERENT else ()
        self._copy_in(flat, self._cuts(flat)[0])
        return agree(self._barrier, label, operation + OPERATIONS * reduction.number, flat.nbytes)

    def begin_again(self, flat: Array, places: Sequence[bytes]) -> None:
        """All have met and know where their arrays lie, but have not copied any values in."""
        if places[self._rank] == ELSEWHERE:
            self._copy_in(flat, self._cuts(flat)[0])
        self._barrier.meet()

    def reduce(self, flat: Array, reduction: Reduction, operation: int, places: Sequence[bytes]) -> None:
        """Then: replace the array, or with REDUCE_SCATTER this rank's chunk of it, by the reduction."""
        call = self._call(flat, reduction, operation, places) if flat.flags.aligned else None
        if call is not None:
            call.go_on(flat)
        else:
            self._by_numpy(flat, reduction, operation, places)

    def _call(self, flat: Array, reduction: Reduction, operation: int, places: Sequence[bytes]) -> WholeCall | None:
        """The same as machine code; None if there is none for that."""
        compiled = self._barrier.compiled
        if not compiled or not WholeCall.suits(reduction, self._nranks):
            return None
        key = (operation, reduction.number, flat.size, *places)
        call = self._calls.get(key)
        if call is None:
            words = self._words(flat, operation, places)
            call = remember(self._calls, key, WholeCall("staged", compiled, flat, reduction, operation, words))
        return call if call.available else None

    def _words(self, flat: Array, operation: int, places: Sequence[bytes]) -> list[int]:
        """Of a plan (common/kernels/layout.py)."""
        bounds, barrier, itemsize = chunk_bounds(flat.size, self._nranks), self._barrier, flat.itemsize
        words = [self._section, len(self._cuts(flat)), int(operation == ALL_REDUCE), itemsize]
        words += [int(places[self._rank] != ELSEWHERE), int(places.count(ELSEWHERE) < self._nranks)]
        words += [int(flat.nbytes >= PAST_BYTES)]
        words += [start * itemsize for start, _ in bounds] + [bounds[-1][1] * itemsize]
        for rank, place in enumerate(places):
            words.append(0 if place == ELSEWHERE else array_at(barrier, rank, place, flat).ctypes.data)
        words += [half.ctypes.data for turn in barrier.halves for half in turn]
        return words + [0] * (self._nranks + 1)

    def _by_numpy(self, flat: Array, reduction: Reduction, operation: int, places: Sequence[bytes]) -> None:
        located = {r: array_at(self._barrier, r, place, flat) for r, place in enumerate(places) if place != ELSEWHERE}
        located[self._rank] = flat
        cuts = self._cuts(flat)
        for piece, following in zip_longest(cuts, cuts[1:]):
            if places[self._rank] == ELSEWHERE and following:
                self._copy_in(flat, following)
            mine = piece[self._rank]
            own = flat[mine]
            inputs = [located[r][mine] if r in located else self._posted(r, self._rank, own) for r in self._order]
            reduction.reduce(inputs, (self._posting(self._rank, own), own))
            self._barrier.meet()
            if operation == ALL_REDUCE:
                for chunk in self._others:
                    part = flat[piece[chunk]]
                    part[...] = self._posted(chunk, chunk, part)

    def _cuts(self, flat: Array) -> list[list[slice]]:
        return cut_pieces(flat.size, self._nranks, self._section // flat.itemsize)

    def _copy_in(self, flat: Array, piece: list[slice]) -> None:
        """Post this rank's values of the chunks that others reduce."""
        for chunk in self._others:
            part = flat[piece[chunk]]
            self._posting(chunk, part)[...] = part

    def _posting(self, chunk: int, like: Array) -> Array:
        """This rank's section for a chunk, to be written before the coming meeting."""
        return self._section_of(self._barrier.halves[self._barrier.turn][self._rank], chunk, like)

    def _posted(self, rank: int, chunk: int, like: Array) -> Array:
        """What `rank` wrote there before the last one."""
        return self._section_of(self._barrier.halves[1 - self._barrier.turn][rank], chunk, like)

    def _section_of(self, half: Array, chunk: int, like: Array) -> Array:
        begin = chunk * self._section
        return half[begin : begin + like.nbytes].view(like.dtype)


class StagedCopies:
    """Once all have met: arrays pass through the halves as they are."""

    def __init__(self, barrier: SharedMemoryBarrier) -> None:
        self._barrier = barrier
        self._others = [r for r in range(barrier.nranks) if r != barrier.rank]

    def broadcast(self, flat: Array, root: int) -> None:
        """Replace the array by rank `root`'s."""
        for a, b in pieces_of(0, flat.nbytes, HALF_BYTES):
            if self._barrier.rank == root:
                self._post(flat, a, b)
            self._barrier.meet()
            if self._barrier.rank != root:
                self._fetch(flat, a, b, root)

    def gather(self, parts: Sequence[Array]) -> None:
        """Replace the part of each other rank, of which all ranks have one, perhaps empty, by what that rank has."""
        for a, b in pieces_of(0, max(part.nbytes for part in parts), HALF_BYTES):
            mine = parts[self._barrier.rank]
            self._post(mine, a, min(b, mine.nbytes))
            self._barrier.meet()
            for rank in self._others:
                self._fetch(parts[rank], a, min(b, parts[rank].nbytes), rank)

    def _post(self, data: Array, a: int, b: int) -> None:
        if a < b:
            self._barrier.halves[self._barrier.turn][self._barrier.rank][: b - a] = data.view(np.uint8)[a:b]

    def _fetch(self, data: Array, a: int, b: int, rank: int) -> None:
        if a < b:
            data.view(np.uint8)[a:b] = self._barrier.halves[1 - self._barrier.turn][rank][: b - a]


@lru_cache(maxsize=MAX_PLANS)
def cut_pieces(length: int, nranks: int, limit: int) -> list[list[slice]]:
    """Where each chunk's part of every piece lies: the first `limit` elements of each chunk, the next ones, ...

    >>> cut_pieces(64, 3, 20)
    [[slice(0, 20, None), slice(32, 48, None), slice(48, 64, None)],
     [slice(20, 32, None), slice(48, 48, None), slice(64, 64, None)]]
    """
    bounds = chunk_bounds(length, nranks)
    longest = max(stop - start for start, stop in bounds)
    return [
        [slice(min(start + at, stop), min(start + at + limit, stop)) for start, stop in bounds]
        for at in range(0, longest, limit)
    ]
