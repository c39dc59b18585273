"""Arrays from `empty` on all ranks: each rank reduces its chunk of all arrays and writes it into all arrays.

    meet | reduce chunk `rank` of all arrays, block by block, and write it into all arrays | meet

A chunk is read by its reducer only, and after the first meeting everyone's values are final: so the reducer may
overwrite the chunk in all arrays at once. A block stays in the cache from its first reading to its last writing.
An all-reduce of M bytes then reads N M and writes N M bytes of memory in all, the least there is.

Source: the shared-memory form of Rabenseifner's reduce-scatter and all-gather, "Optimization of collective reduction
operations", 2004.
"""

from __future__ import annotations

from collections.abc import Sequence

from collective.calls import ALL_REDUCE, Array
from collective.shared_memory.agreement import array_at
from collective.shared_memory.barrier import SharedMemoryBarrier
from collective.shared_memory.plans import remember
from common.tensors.buckets import chunk_bounds, pieces_of
from common.tensors.reduction import Reduction, canonical_ranks

__all__ = ["BLOCK_BYTES", "InPlaceReduction"]

BLOCK_BYTES = 128 * 1024  # reduced at a time: a block of every rank stays in a core's L2 cache

Plan = list[tuple[Sequence[Array], Sequence[Array]]]  # inputs in canonical order and outputs, for each block


class InPlaceReduction:
    """
    Args:
        scratch: of BLOCK_BYTES of partial results; see Reduction.reduce.
    """

    def __init__(self, barrier: SharedMemoryBarrier, scratch: Array) -> None:
        self._rank, self._nranks = barrier.rank, barrier.nranks
        self._barrier, self._scratch = barrier, scratch
        self._plans: dict[tuple[object, ...], Plan] = {}

    def reduce(self, flat: Array, reduction: Reduction, operation: int, places: Sequence[bytes]) -> None:
        """Once all have met: replace the array, or with REDUCE_SCATTER this rank's chunk of it, by the reduction."""
        key = (operation, reduction, flat.size, *places)
        plan = self._plans.get(key)
        if plan is None:
            plan = remember(self._plans, key, self._plan(flat, operation, places))
        for inputs, outputs in plan:
            reduction.reduce(inputs, outputs, self._scratch)
        self._barrier.meet()

    def gather(self, flat: Array, places: Sequence[bytes]) -> None:
        """Once all have met: write this rank's chunk into all arrays."""
        mine = slice(*chunk_bounds(flat.size, self._nranks)[self._rank])
        for rank, place in enumerate(places):
            if rank != self._rank:
                array_at(self._barrier, rank, place, flat)[mine] = flat[mine]
        self._barrier.meet()

    def _plan(self, flat: Array, operation: int, places: Sequence[bytes]) -> Plan:
        arrays = [array_at(self._barrier, r, places[r], flat) for r in canonical_ranks(self._rank, self._nranks)]
        plan: Plan = []
        for a, b in pieces_of(*chunk_bounds(flat.size, self._nranks)[self._rank], BLOCK_BYTES // flat.itemsize):
            inputs = [array[a:b] for array in arrays]
            plan.append((inputs, inputs if operation == ALL_REDUCE else [inputs[0], inputs[-1]]))
        return plan
