"""Short arrays, wherever they lie: all ranks post their values in one area, and each reduces by itself all it needs.

That takes more additions and one meeting less than the other ways. Each chunk is posted in the place of its term: term
k has of every chunk the values that come k-th in its canonical order, so that all chunks are added up at once:

    copy values in | meet | reduce              N = 4      chunk 0   chunk 1   chunk 2   chunk 3
                                                term 0     rank 1    rank 2    rank 3    rank 0
                                                term 1     rank 2    rank 3    rank 0    rank 1
                                                ...

Where meetings are compiled, all of that is one call (common/kernels/whole_calls.py).
"""

from __future__ import annotations

from collections.abc import Callable

from collective.call_tags import ALL_REDUCE, OPERATIONS, Array, Label
from collective.plans import remember
from collective.shared_memory.agree import agree
from collective.shared_memory.barrier import SharedMemoryBarrier
from collective.shared_memory.known_calls import KnownCalls, end
from collective.shared_memory.whole_calls import WholeCall
from common.system.memory import ALIGNMENT_BYTES
from common.tensors.buckets import chunk_bounds
from common.tensors.canonical_order import canonical_ranks
from common.tensors.reduction import Reduction

__all__ = ["ShortReduction"]


class ShortReduction:
    """Arrays are of at most the barrier's short_bytes: terms of N such arrays fit there."""

    def __init__(self, barrier: SharedMemoryBarrier) -> None:
        self._barrier = barrier
        self._plans: dict[tuple[object, ...], Posting | WholeCall] = {}
        self.known = KnownCalls(barrier)

    def reduce(self, flat: Array, reduction: Reduction, label: Label, operation: int) -> None:
        """Replace the array, or with REDUCE_SCATTER this rank's chunk of it, by the reduction over ranks."""
        key = (operation, reduction.number, flat.size)
        plan = self._plans.get(key)
        if plan is None:
            plan = remember(self._plans, key, self._plan(flat, reduction, operation))
        if isinstance(plan, Posting):
            plan.reduce(flat, label)
            return
        end(self._barrier, plan, plan.reduce(flat, label))
        if operation == ALL_REDUCE:
            self.known.add(plan, reduction.op, flat.size)

    def _plan(self, flat: Array, reduction: Reduction, operation: int) -> Posting | WholeCall:
        layout = Layout(self._barrier, flat, operation)
        compiled = self._barrier.compiled
        if compiled and WholeCall.suits(reduction, self._barrier.nranks):
            call = WholeCall("short", compiled, flat, reduction, operation, layout.words(self._barrier, flat.itemsize))
            if call.available:
                return call
        return Posting(self._barrier, flat, reduction, operation, layout)


class Layout:
    """Where terms lie in an area, in elements, and what is wanted of an array."""

    def __init__(self, barrier: SharedMemoryBarrier, flat: Array, operation: int) -> None:
        self.apart = -(-flat.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // flat.itemsize
        self.chunks = chunk_bounds(flat.size, barrier.nranks)
        self.wanted = slice(0, flat.size) if operation == ALL_REDUCE else slice(*self.chunks[barrier.rank])

    def words(self, barrier: SharedMemoryBarrier, itemsize: int) -> list[int]:
        """Of a plan (common/kernels/layout.py)."""
        areas = [area.ctypes.data for area in barrier.short]
        first, count = self.wanted.start * itemsize, self.wanted.stop - self.wanted.start
        cuts = [start * itemsize for start, _ in self.chunks] + [self.chunks[-1][1] * itemsize]
        return [*areas, self.apart * itemsize, first, count, *cuts]


class Posting:
    """By NumPy, and what reduces for it."""

    def __init__(
        self, barrier: SharedMemoryBarrier, flat: Array, reduction: Reduction, operation: int, layout: Layout
    ) -> None:
        nranks = barrier.nranks
        self._barrier, self._wanted, self._phase = barrier, layout.wanted, operation + OPERATIONS * reduction.number
        self._turns: list[tuple[list[tuple[Array, slice]], Callable[[Array], object]]] = []
        for short in barrier.short:
            area = short.view(flat.dtype)
            terms = [area[k * layout.apart :][: flat.size] for k in range(nranks)]
            places = [
                (terms[canonical_ranks(c, nranks).index(barrier.rank)][start:stop], slice(start, stop))
                for c, (start, stop) in enumerate(layout.chunks)
                if start < stop
            ]
            self._turns.append((places, reduction.into([term[layout.wanted] for term in terms])))

    def reduce(self, flat: Array, label: Label) -> None:
        places, reduce = self._turns[self._barrier.turn]
        for place, chunk in places:
            place[...] = flat[chunk]
        agree(self._barrier, label, self._phase, flat.nbytes)
        reduce(flat[self._wanted])
