"""All-reduce of two ranks whose arrays are not from `empty`: each copies its values in, by pieces, and reduces all.

    copy values in | meet | copy the next in, reduce | meet | copy the next in, reduce | ...

So an array is read and written once, while its piece is in the cache, and there is one meeting a piece and one copy;
where each reduces a half, results are copied out as well (staged.py). That both do all additions costs next to nothing.

Who has copied the next piece in may come to the next meeting at once, and read the other's piece after it. So a half
holds PAIR_SLOTS pieces, in turn: none is written again before 2 PAIR_SLOTS more meetings. Only to the last meeting of a
call does each come when it has done with the piece before, so that what follows finds the halves as after any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from collective.call_tags import ALL_REDUCE, OPERATIONS, Array, Label
from collective.plans import remember
from collective.shared_memory.agree import agree, places_of
from collective.shared_memory.barrier import HALF_BYTES, SharedMemoryBarrier
from collective.shared_memory.whole_calls import WholeCall
from common.kernels.layout import DIFFERENT, PAIR_SLOTS
from common.tensors.buckets import chunk_bounds
from common.tensors.reduction import Reduction

__all__ = ["PairedReduction"]

SLOT_BYTES = HALF_BYTES // PAIR_SLOTS


class PairedReduction:
    """Both must be about to do it."""

    def __init__(self, barrier: SharedMemoryBarrier) -> None:
        self._barrier, self._rank = barrier, barrier.rank
        self._calls: dict[tuple[object, ...], WholeCall] = {}

    def begin(self, flat: Array, reduction: Reduction, label: Label) -> Sequence[bytes]:
        """Meet; returns where both arrays lie, if one is from `empty`: then nothing else has been done. Nothing if that
        was already the whole reduction."""
        call = self._call(flat, reduction)
        if call is not None:
            return places_of(self._barrier, call.notes()) if call.reduce(flat, label) == DIFFERENT else ()
        cuts = self._cuts(flat)
        self._copy_in(flat, cuts, 0)
        places = agree(self._barrier, label, ALL_REDUCE + OPERATIONS * reduction.number, flat.nbytes)
        if len(set(places)) > 1:
            return places
        self._by_numpy(flat, reduction, cuts)
        return ()

    def _call(self, flat: Array, reduction: Reduction) -> WholeCall | None:
        """The same as machine code; None if there is none for that."""
        compiled = self._barrier.compiled
        if not compiled or not WholeCall.suits(reduction, 2):
            return None
        key = (reduction.number, flat.size)
        call = self._calls.get(key)
        if call is None:
            words = self._words(flat)
            call = remember(self._calls, key, WholeCall("paired", compiled, flat, reduction, ALL_REDUCE, words))
        return call if call.available else None

    def _words(self, flat: Array) -> list[int]:
        """Of a plan (common/kernels/layout.py)."""
        cuts, itemsize, bounds = self._cuts(flat), flat.itemsize, chunk_bounds(flat.size, 2)
        words = [SLOT_BYTES, len(cuts), len(cuts) // 2, itemsize]
        words += [start * itemsize for start, _ in bounds] + [bounds[-1][1] * itemsize]
        return words + [half.ctypes.data for turn in self._barrier.halves for half in turn]

    def _by_numpy(self, flat: Array, reduction: Reduction, cuts: Sequence[tuple[int, slice]]) -> None:
        """When both have met for the first piece."""
        for piece, (chunk, cut) in enumerate(cuts):
            if piece:
                self._barrier.meet()
            turn = self._barrier.turn
            if piece + 1 < len(cuts):
                self._copy_in(flat, cuts, piece + 1)
            mine = flat[cut]
            theirs = self._slot(1 - turn, 1 - self._rank, piece, mine)
            reduction.reduce((theirs, mine) if chunk == self._rank else (mine, theirs), (mine,))

    def _cuts(self, flat: Array) -> list[tuple[int, slice]]:
        """The pieces, each with the number of its chunk; of both chunks as many, the last one perhaps empty."""
        length, (first, second) = SLOT_BYTES // flat.itemsize, chunk_bounds(flat.size, 2)
        each = -(-max(stop - start for start, stop in (first, second)) // length)
        return [
            (chunk, slice(min(start + i * length, stop), min(start + (i + 1) * length, stop)))
            for chunk, (start, stop) in enumerate((first, second))
            for i in range(each)
        ]

    def _copy_in(self, flat: Array, cuts: Sequence[tuple[int, slice]], piece: int) -> None:
        values = flat[cuts[piece][1]]
        self._slot(self._barrier.turn, self._rank, piece, values)[...] = values

    def _slot(self, turn: int, rank: int, piece: int, like: Array) -> Array:
        begin = piece // 2 % PAIR_SLOTS * SLOT_BYTES
        return self._barrier.halves[turn][rank][begin : begin + like.nbytes].view(like.dtype)
