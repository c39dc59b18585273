"""Whole reductions as one call of machine code (common/kernels/whole_calls.py), where meetings are compiled."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np

from collective.call_tags import OPERATIONS, Array, Label
from collective.shared_memory.meetings.compiled import CompiledMeetings
from common.kernels.layout import ARRAY, LATE, POSITION, RESULT, UNFIT, WORD
from common.kernels.loader import called, whole_call
from common.kernels.names import Whole
from common.tensors.reduction import MOST_INPUTS, Reduction

__all__ = ["WholeCall"]

SAID = struct.Struct("=qQQ")  # what each call says in its plan, from ARRAY on: the array, STEP, LABEL


class WholeCall:
    """A plan for arrays of one dtype and size, and what carries it out.

    Attributes:
        arrays: what its words are addresses in, kept alive.

    Args:
        way: of common/kernels/names.py.
        words: of the plan, from where those of the way begin.
    """

    arrays: Sequence[Array] = ()

    def __init__(
        self,
        way: str,
        meetings: CompiledMeetings,
        flat: Array,
        reduction: Reduction,
        operation: int,
        words: Sequence[int],
    ) -> None:
        dtype = np.dtype(flat.dtype.name)
        head = [ctypes.addressof(meetings.frame), 0, 0, 0, 0, operation + OPERATIONS * reduction.number, flat.nbytes]
        code = whole_call(Whole(way, reduction.op, dtype.name, meetings.nranks))
        self.available = code is not None
        head += [id(dtype), flat.size, word_of(reduction.scale), code or 0]
        self._plan = (ctypes.c_int64 * (len(head) + len(words)))(*head, *words)
        self.plan, self.dtype = ctypes.addressof(self._plan), dtype
        self._frame, self._meetings = meetings.frame, meetings
        self._run = called(code or 0, self.plan)

    @staticmethod
    def suits(reduction: Reduction, nranks: int) -> bool:
        """Whether there may be machine code for it: the same on all ranks."""
        return not reduction.widens and nranks <= MOST_INPUTS

    def notes(self) -> list[bytes]:
        """Of all ranks, when they were DIFFERENT."""
        return self._meetings.notes()

    def attempt(self, array: Array, label: Label) -> int:
        """Reduce a C-contiguous array. Returns MET when it is done; UNFIT if the array is not as planned, DIFFERENT if
        the notes of the ranks are: then it is as it was."""
        epoch, step, bucket = label
        SAID.pack_into(self._plan, WORD * ARRAY, id(array), step, epoch | bucket << 32)
        self._run()
        return self.finish()

    def finish(self) -> int:
        """Wait, if need be; returns what the call has come to."""
        state: int = self._frame[RESULT]
        if state == LATE:
            self._meetings.wait_longer(self._run)
            state = self._frame[RESULT]
        return state

    def reduce(self, flat: Array, label: Label) -> int:
        """As `attempt`, also of arrays that are not aligned or have a dtype of the same name."""
        state = self.attempt(flat, label)
        if state == UNFIT:
            copy = flat.astype(self.dtype, copy=True)
            state = self.attempt(copy, label)
            flat[...] = copy
        return state

    def go_on(self, flat: Array) -> None:
        """Reduce an aligned array by this plan when the ranks have met, and lie where its words say."""
        self._plan[POSITION] = 1
        self.attempt(flat, (0, 0, 0))


def word_of(scale: Array | None) -> int:
    """The bits of a factor, in the first bytes of a word."""
    word = np.zeros(1, np.int64)
    if scale is not None:
        word.view(scale.dtype)[0] = scale
    return int(word[0])
