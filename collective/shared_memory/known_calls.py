"""Short all-reduces of kinds that there were before: one call from Python each (common/kernels/repeat.py).

A kind is an op, a dtype and a size. Of two kinds that have the same slot, that which came last is known.
"""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np
import numpy.typing as npt

from collective.algorithm import Repeat, no_repeat
from collective.shared_memory.agree import places_of
from collective.shared_memory.barrier import SharedMemoryBarrier
from collective.shared_memory.meetings.compiled import address_of
from collective.shared_memory.whole_calls import WholeCall
from common.kernels.layout import ARRAY_TYPE, DIFFERENT, FINISH, MET, PLAN, PLANS, SLOTS, TO_BOOL, slot_of
from common.kernels.loader import repeat_kernel

__all__ = ["KnownCalls", "end"]

PYTHONS = (  # functions, from TO_BOOL on
    ctypes.pythonapi.PyBool_FromLong,
    ctypes.pythonapi.PyLong_AsUnsignedLongLong,
    ctypes.pythonapi.PyErr_Clear,
    ctypes.pythonapi.PyEval_SaveThread,
    ctypes.pythonapi.PyEval_RestoreThread,
    ctypes.pythonapi.PyObject_CallNoArgs,
)


class KnownCalls:
    """`repeat`: of those that were added (collective/algorithm.py)."""

    def __init__(self, barrier: SharedMemoryBarrier) -> None:
        self.repeat: Repeat = no_repeat
        self._calls: dict[int, WholeCall] = {}  # by slot
        self._table = np.zeros(PLANS + 2 * SLOTS, np.int64)
        self._finish = partial(finish, self._table, self._calls, barrier)
        self._table[[ARRAY_TYPE, FINISH]] = id(np.ndarray), id(self._finish)
        self._table[TO_BOOL:PLANS] = [address_of(function) for function in PYTHONS]
        if barrier.compiled:
            self.repeat = repeat_kernel(self._table) or no_repeat

    def add(self, call: WholeCall, op: str, size: int) -> None:
        slot = slot_of(id(op), id(call.dtype), size)
        self._calls[slot] = call
        self._table[PLANS + slot : PLANS + slot + 2] = id(op), call.plan


def finish(table: npt.NDArray[np.int64], calls: dict[int, WholeCall], barrier: SharedMemoryBarrier) -> bool:
    """What was begun last, when the ranks had not met at once, or differed."""
    call = next(call for call in calls.values() if call.plan == table[PLAN])
    return end(barrier, call, call.finish())


def end(barrier: SharedMemoryBarrier, call: WholeCall, state: int) -> bool:
    """Whether a call that came to that was done; raises as `agree`."""
    if state == DIFFERENT:
        places_of(barrier, call.notes())
    return state == MET
