"""Short arrays, wherever they lie: all ranks post their values in one area, and each reduces by itself all it needs.

That takes more additions and one meeting less than the other ways. Each chunk is posted in the place of its term: term
k has of every chunk the values that come k-th in its canonical order, so that all chunks are added up at once:

    copy values in | meet | reduce              N = 4      chunk 0   chunk 1   chunk 2   chunk 3
                                                term 0     rank 1    rank 2    rank 3    rank 0
                                                term 1     rank 2    rank 3    rank 0    rank 1
                                                ...
"""

from __future__ import annotations

from collections.abc import Callable

from collective.calls import ALL_REDUCE, OPERATIONS, Array, Label
from collective.shared_memory.agreement import agree
from collective.shared_memory.barrier import SharedMemoryBarrier
from collective.shared_memory.plans import remember
from common.system.memory import ALIGNMENT_BYTES
from common.tensors.buckets import chunk_bounds
from common.tensors.reduction import Reduction, canonical_ranks

__all__ = ["ShortReduction"]

# Where to post what; what reduces the terms; the chunk of which, or all.
Plan = tuple[list[tuple[Array, slice]], Callable[[Array], object], slice | None]


class ShortReduction:
    """Arrays are of at most SHORT_BYTES (barrier.py): terms of N such arrays fit there."""

    def __init__(self, barrier: SharedMemoryBarrier) -> None:
        self._rank, self._nranks = barrier.rank, barrier.nranks
        self._barrier = barrier
        self._plans: dict[tuple[object, ...], Plan] = {}

    def reduce(self, flat: Array, reduction: Reduction, label: Label, operation: int) -> None:
        """Replace the array, or with REDUCE_SCATTER this rank's chunk of it, by the reduction over ranks."""
        key = (operation, reduction.number, flat.size, self._barrier.turn)
        plan = self._plans.get(key)
        if plan is None:
            plan = remember(self._plans, key, self._plan(flat, reduction, operation))
        places, reduce, wanted = plan
        for place, chunk in places:
            place[...] = flat[chunk]
        agree(self._barrier, label, operation + OPERATIONS * reduction.number, flat.nbytes)
        reduce(flat if wanted is None else flat[wanted])

    def _plan(self, flat: Array, reduction: Reduction, operation: int) -> Plan:
        area = self._barrier.short[self._barrier.turn].view(flat.dtype)
        apart = -(-flat.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // flat.itemsize
        terms = [area[k * apart :][: flat.size] for k in range(self._nranks)]
        chunks = [slice(*bounds) for bounds in chunk_bounds(flat.size, self._nranks)]
        places = [
            (terms[canonical_ranks(c, self._nranks).index(self._rank)][chunk], chunk)
            for c, chunk in enumerate(chunks)
            if chunk.start < chunk.stop
        ]
        if operation == ALL_REDUCE:
            return places, reduction.into(terms), None
        mine = chunks[self._rank]
        return places, reduction.into([term[mine] for term in terms]), mine
