"""The direct algorithm for ranks of one host: they reduce straight out of each other's memory, in one of four ways.

    short      up to the barrier's short_bytes   short.py
    in place   all ranks' arrays are `empty`'s   in_place.py
    paired     neither of two ranks' is          paired.py
    staged     some are not                      staged.py

Every call begins with a meeting where the ranks compare what they are about to do (agree.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt

from collective.algorithm import Algorithm, Watch
from collective.call_tags import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    GATHER_CHUNKS,
    OPERATIONS,
    REDUCE_SCATTER,
    SHARE,
    Array,
    Label,
)
from collective.shared_memory.agree import ELSEWHERE, agree, place_of, segment_at
from collective.shared_memory.barrier import SharedMemoryBarrier
from collective.shared_memory.in_place import IN_ONE_CALL, InPlaceReduction
from collective.shared_memory.paired import PairedReduction
from collective.shared_memory.short import ShortReduction
from collective.shared_memory.staged import StagedCopies, StagedReduction
from common.tensors.buckets import chunk_bounds
from common.tensors.reduction import Reduction

__all__ = ["SharedMemoryAlgorithm"]


class SharedMemoryAlgorithm(Algorithm):
    name = "direct"

    def __init__(self, barrier: SharedMemoryBarrier) -> None:
        self.rank, self.nranks = barrier.rank, barrier.nranks
        self._barrier = barrier
        self._short = ShortReduction(barrier)
        self.repeat = self._short.known.repeat
        self._in_place = InPlaceReduction(barrier)
        self._paired = PairedReduction(barrier)
        self._staged = StagedReduction(barrier)
        self._copies = StagedCopies(barrier)

    def empty(self, count: int, dtype: npt.DTypeLike) -> Array:
        return self._barrier.empty(count, dtype)

    def all_reduce(self, flat: Array, reduction: Reduction, label: Label) -> None:
        self._reduce(flat, reduction, label, ALL_REDUCE)

    def all_reduce_watched(self, flat: Array, reduction: Reduction, label: Label, watch: Watch) -> None:
        place = place_of(self._barrier, flat)
        if place == ELSEWHERE or flat.nbytes <= IN_ONE_CALL:
            super().all_reduce_watched(flat, reduction, label, watch)
            return
        places = self._in_place.begin(flat, reduction, label, ALL_REDUCE, place)
        if ELSEWHERE in places:
            watch.look()
            self._from_elsewhere(flat, reduction, ALL_REDUCE, places)
        else:
            self._in_place.reduce_watched(flat, reduction, places, watch)

    def reduce_scatter(self, flat: Array, reduction: Reduction, label: Label) -> None:
        self._reduce(flat, reduction, label, REDUCE_SCATTER)

    def all_gather(self, rows: Array, label: Label) -> None:
        agree(self._barrier, label, ALL_GATHER + OPERATIONS * rows.dtype.num, rows[0].nbytes)
        self._copies.gather(list(rows))

    def gather_chunks(self, flat: Array, label: Label) -> None:
        phase, place = GATHER_CHUNKS + OPERATIONS * flat.dtype.num, place_of(self._barrier, flat)
        places = agree(self._barrier, label, phase, flat.nbytes, place=place)
        if ELSEWHERE in places:
            self._copies.gather([flat[a:b] for a, b in chunk_bounds(flat.size, self.nranks)])
        else:
            self._in_place.gather(flat, places)

    def broadcast(self, flat: Array, root: int, label: Label) -> None:
        agree(self._barrier, label, BROADCAST + OPERATIONS * flat.dtype.num, flat.nbytes, root=root)
        self._copies.broadcast(flat, root)

    def barrier(self, label: Label) -> None:
        agree(self._barrier, label, BARRIER, 0)

    def share(self, flat: Array, label: Label) -> bool:
        number = self._barrier.whole_segment(flat)
        place = ELSEWHERE if number is None else place_of(self._barrier, flat)
        places = agree(self._barrier, label, SHARE + OPERATIONS * flat.dtype.num, flat.nbytes, place=place)
        if number is None or ELSEWHERE in places:
            return False
        self._barrier.share(number, 0, segment_at(places[0]))
        return True

    def close(self, reason: str = "") -> None:
        self._barrier.close(reason)

    def _reduce(self, flat: Array, reduction: Reduction, label: Label, operation: int) -> None:
        if flat.nbytes <= self._barrier.short_bytes:
            self._short.reduce(flat, reduction, label, operation)
            return
        place = place_of(self._barrier, flat)
        if place != ELSEWHERE:
            places = self._in_place.begin(flat, reduction, label, operation, place)
        elif self._pairs(operation):
            places = self._paired.begin(flat, reduction, label)
        else:
            places = self._staged.begin(flat, reduction, label, operation)
        if places and ELSEWHERE not in places:
            self._in_place.reduce(flat, reduction, operation, places)
        elif places:
            self._from_elsewhere(flat, reduction, operation, places)

    def _pairs(self, operation: int) -> bool:
        return self.nranks == 2 and operation == ALL_REDUCE

    def _from_elsewhere(self, flat: Array, reduction: Reduction, operation: int, places: Sequence[bytes]) -> None:
        """Once all have met, where some arrays are not in shared memory."""
        if self._pairs(operation):
            self._staged.begin_again(flat, places)
        self._staged.reduce(flat, reduction, operation, places)
