"""Arrays from `empty` on all ranks: each rank reduces its chunk of all arrays and writes it into all arrays.

    meet | reduce chunk `rank` of all arrays and write it into all arrays | meet

A chunk is read by its reducer only, and after the first meeting everyone's values are final: so the reducer may
overwrite the chunk in all arrays at once, element by element. An all-reduce of M bytes then reads N M and writes N M
bytes of memory in all, the least there is.

Source: the shared-memory form of Rabenseifner's reduce-scatter and all-gather, "Optimization of collective reduction
operations", 2004.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from collective.call_tags import ALL_REDUCE, Array
from collective.plans import remember
from collective.shared_memory.agree import array_at
from collective.shared_memory.barrier import SharedMemoryBarrier
from common.tensors.buckets import chunk_bounds
from common.tensors.canonical_order import canonical_ranks
from common.tensors.reduction import Reduction

__all__ = ["InPlaceReduction"]


class InPlaceReduction:
    def __init__(self, barrier: SharedMemoryBarrier) -> None:
        self._rank, self._nranks = barrier.rank, barrier.nranks
        self._barrier = barrier
        self._plans: dict[tuple[object, ...], Callable[[], object]] = {}

    def reduce(self, flat: Array, reduction: Reduction, operation: int, places: Sequence[bytes]) -> None:
        """Once all have met: replace the array, or with REDUCE_SCATTER this rank's chunk of it, by the reduction."""
        key = (operation, reduction, flat.size, *places)
        plan = self._plans.get(key)
        if plan is None:
            plan = remember(self._plans, key, self._plan(flat, reduction, operation, places))
        plan()
        self._barrier.meet()

    def gather(self, flat: Array, places: Sequence[bytes]) -> None:
        """Once all have met: write this rank's chunk into all arrays."""
        mine = slice(*chunk_bounds(flat.size, self._nranks)[self._rank])
        for rank, place in enumerate(places):
            if rank != self._rank:
                array_at(self._barrier, rank, place, flat)[mine] = flat[mine]
        self._barrier.meet()

    def _plan(self, flat: Array, reduction: Reduction, operation: int, places: Sequence[bytes]) -> Callable[[], object]:
        mine = slice(*chunk_bounds(flat.size, self._nranks)[self._rank])
        order = canonical_ranks(self._rank, self._nranks)
        chunks = [array_at(self._barrier, r, places[r], flat)[mine] for r in order]  # this rank's own is the last
        return reduction.prepared(chunks, chunks if operation == ALL_REDUCE else chunks[-1:])
