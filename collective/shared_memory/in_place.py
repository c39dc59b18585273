"""Arrays from `empty` on all ranks: each rank reduces its chunk of all arrays and writes it into all arrays.

    meet | reduce chunk `rank` of all arrays and write it into all arrays | meet

Where meetings are compiled, and all arrays lie at the same place of their ranks' memory, as those do that all ranks
have made alike, all of that is one call from the second time on, up to IN_ONE_CALL bytes: above, Python adds nothing.

A chunk is read by its reducer only, and after the first meeting everyone's values are final: so the reducer may
overwrite the chunk in all arrays at once, element by element. An all-reduce of M bytes then reads N M and writes N M
bytes of memory in all, the least there is.

Source: the shared-memory form of Rabenseifner's reduce-scatter and all-gather, "Optimization of collective reduction
operations", 2004.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from collective.algorithm import Watch
from collective.call_tags import ALL_REDUCE, OPERATIONS, Array, Label
from collective.plans import remember
from collective.shared_memory.agree import PLACE, agree, array_at, places_of
from collective.shared_memory.barrier import SharedMemoryBarrier
from collective.shared_memory.whole_calls import WholeCall
from common.kernels.layout import MET, UNFIT
from common.tensors.buckets import chunk_bounds
from common.tensors.canonical_order import canonical_ranks
from common.tensors.reduction import Reduction

__all__ = ["IN_ONE_CALL", "InPlaceReduction"]

IN_ONE_CALL = 4 << 20


class InPlaceReduction:
    def __init__(self, barrier: SharedMemoryBarrier) -> None:
        self._rank, self._nranks = barrier.rank, barrier.nranks
        self._barrier = barrier
        self._plans: dict[tuple[object, ...], Callable[[], object]] = {}
        self._watched: dict[tuple[object, ...], Callable[[], Sequence[int]]] = {}
        self._calls: dict[tuple[object, ...], WholeCall] = {}

    def begin(self, flat: Array, reduction: Reduction, label: Label, operation: int, place: bytes) -> Sequence[bytes]:
        """Meet, when this rank's array lies at that place; returns where all arrays lie. Nothing if that was already
        the whole reduction."""
        call = self._calls.get((reduction.number, flat.size, place)) if operation == ALL_REDUCE else None
        state = call.attempt(flat, label) if call else UNFIT
        if state == MET:
            return ()
        if call and state != UNFIT:
            return places_of(self._barrier, call.notes())
        return agree(self._barrier, label, operation + OPERATIONS * reduction.number, flat.nbytes, place=place)

    def reduce(self, flat: Array, reduction: Reduction, operation: int, places: Sequence[bytes]) -> None:
        """Once all have met: replace the array, or with REDUCE_SCATTER this rank's chunk of it, by the reduction."""
        key = (operation, reduction, flat.size, *places)
        plan = self._plans.get(key)
        if plan is None:
            plan = remember(self._plans, key, self._plan(flat, reduction, operation, places))
            if operation == ALL_REDUCE and len({*places}) == 1 and flat.nbytes <= IN_ONE_CALL:
                self._prepare(flat, reduction, places)
        plan()
        self._barrier.meet()

    def reduce_watched(self, flat: Array, reduction: Reduction, places: Sequence[bytes], watch: Watch) -> None:
        """Likewise, of a mean of floats."""
        key = (reduction, flat.size, *places)
        plan = self._watched.get(key)
        if plan is None:
            plan = remember(self._watched, key, reduction.watched(self._chunks(flat, places)))
        order = canonical_ranks(self._rank, self._nranks)
        for number in plan():
            watch.saw(order[number], slice(*chunk_bounds(flat.size, self._nranks)[self._rank]))
        self._barrier.meet()

    def _prepare(self, flat: Array, reduction: Reduction, places: Sequence[bytes]) -> None:
        """The same as machine code, if there is any for that: from the next time on, as long as all lie there."""
        compiled = self._barrier.compiled
        if not compiled or not WholeCall.suits(reduction, self._nranks):
            return
        chunks = self._chunks(flat, places)
        words = [*PLACE.unpack(places[0]), chunks[0].size, *(chunk.ctypes.data for chunk in chunks)]
        call = WholeCall("placed", compiled, flat, reduction, ALL_REDUCE, words)
        if call.available:
            call.arrays = chunks
            remember(self._calls, (reduction.number, flat.size, places[0]), call)

    def gather(self, flat: Array, places: Sequence[bytes]) -> None:
        """Once all have met: write this rank's chunk into all arrays."""
        mine = slice(*chunk_bounds(flat.size, self._nranks)[self._rank])
        for rank, place in enumerate(places):
            if rank != self._rank:
                array_at(self._barrier, rank, place, flat)[mine] = flat[mine]
        self._barrier.meet()

    def _plan(self, flat: Array, reduction: Reduction, operation: int, places: Sequence[bytes]) -> Callable[[], object]:
        chunks = self._chunks(flat, places)
        return reduction.prepared(chunks, chunks if operation == ALL_REDUCE else chunks[-1:])

    def _chunks(self, flat: Array, places: Sequence[bytes]) -> list[Array]:
        """This rank's of all arrays, in canonical order: its own is the last."""
        mine = slice(*chunk_bounds(flat.size, self._nranks)[self._rank])
        order = canonical_ranks(self._rank, self._nranks)
        return [array_at(self._barrier, r, places[r], flat)[mine] for r in order]
