"""Gradients that are NaN or infinite: found on the rank that made them, before they are added to the others'.

A scheme has its guard look at each bucket just before it hands it over. What a guard refuses changes no parameter on
any rank, and all ranks raise the same NonFiniteGradient; how they agree on it is the scheme's affair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import NonFiniteGradient
from common.system.process import say
from common.tensors.arena import Arena
from common.tensors.buckets import words
from common.tensors.reduction import all_finite

__all__ = ["POLICIES", "UNGUARDED", "Guard"]

POLICIES = ("auto", "warn", "error")
NOTHING = -1  # in a report, as the slot

Reports = npt.NDArray[np.int64]  # of one rank, or of all


@dataclass(frozen=True)
class Finding:
    """The first parameter of a rank's, and how many of its values are not finite."""

    slot: int
    count: int


class Guard:
    """
    Args:
        arena: its gradients are this rank's own until they are handed over.
        refuses: else a line on stderr names the first that it finds, and that is all.
        excused: asked when it has found something; if so, that is somebody else's business, now and later.
    """

    def __init__(self, arena: Arena, rank: int, *, refuses: bool, excused: Callable[[], bool] = lambda: False) -> None:
        self.refuses = refuses
        self._arena, self._rank, self._excused = arena, rank, excused
        self._looks = True
        self._step = 0
        self.found: Finding | None = None  # what was refused

    def look(self, bucket: int, step: int) -> bool:
        """Whether this bucket of this rank's gradients must not be used in that step, nor any later one."""
        if self.found or not self._looks:
            return self.found is not None
        if all_finite(self._words_of(bucket)) or (found := self._first_in(bucket)) is None:  # None: between parameters
            return False
        self._step = step
        if self._excused():
            self._looks = False
        elif self.refuses:
            self.found = found
        else:
            self._warn(self._in_words(found, self._rank))
        return self.found is not None

    @property
    def only_warns(self) -> bool:
        """Whether it has anything to look for, and refuses nothing: then it may as well be told by `saw` when the
        bucket is the mean already."""
        return self._looks and not self.refuses

    def saw(self, bucket: int, step: int, rank: int, elements: slice) -> None:
        """That rank's gradients were not finite in that step, somewhere among these elements of the bucket, which are
        the mean over ranks by now."""
        where = self._arena.buckets[bucket]
        start, stop = (where.start + words(where.dtype) * each for each in (elements.start, elements.stop))
        for slot in self._arena.layout.slots:
            first, last = max(start, slot.start), min(stop, slot.stop)
            if self._looks and first < last and not all_finite(self._arena.gradients[first:last].view(where.dtype)):
                self._step = step
                if self._excused():
                    self._looks = False
                else:
                    self._warn(f"rank {rank}'s gradient of parameter {slot.name} is not finite at step {step:,}")

    def _warn(self, what: str) -> None:
        """Once."""
        self._looks = False
        say(f"gradsync: {what}; the program goes on (--non-finite error stops it)")

    def spoil(self, bucket: int) -> None:
        """Make a bucket that was refused such that its mean tells all ranks, wherever they look."""
        self._words_of(bucket).fill(math.nan)

    def compare_notes(self, all_gather: Callable[[Reports], Reports], step: int, *, whole: bool = True) -> None:
        """After all buckets of a step were averaged, those that were refused spoiled: called by all ranks.

        Args:
            all_gather: between the ranks, stacked; called by all of them or by none.
            whole: whether each rank has all means in its arena, so that all see whether there is anything to compare.

        Raises:
            NonFiniteGradient: some rank has refused a bucket, or a sum overflowed; the same on all ranks.
        """
        if not self.refuses or (whole and not self._is_spoiled()):
            return
        self._step = step
        for rank, (slot, count) in enumerate(all_gather(self._report()).tolist()):
            if slot != NOTHING:
                raise self._error_of(Finding(slot, count), rank)
        if whole:
            raise self._overflow(step)

    def error(self) -> NonFiniteGradient:
        """That this rank refuses what it has found."""
        assert self.found
        return self._error_of(self.found, self._rank)

    def _is_spoiled(self) -> bool:
        """Whether the means in the arena tell that some rank has refused a bucket, or that a sum overflowed."""
        return not all(math.isfinite(self._words_of(bucket)[0]) for bucket in range(len(self._arena.buckets)))

    def _report(self) -> Reports:
        """For the other ranks: the slot and the count of what was found."""
        return np.array([self.found.slot, self.found.count] if self.found else [NOTHING, 0], np.int64)

    def _error_of(self, found: Finding, rank: int) -> NonFiniteGradient:
        return NonFiniteGradient(
            f"{self._in_words(found, rank)}; no parameter was changed: lower the learning rate, clip, or look at the "
            "data of that step"
        )

    def _overflow(self, step: int) -> NonFiniteGradient:
        """That a mean in the arena is not finite although all that was added was."""
        bucket = next(b for b in range(len(self._arena.buckets)) if not math.isfinite(self._words_of(b)[0]))
        found = self._first_in(bucket)
        name = self._arena.layout.slots[found.slot].name if found else "?"
        return NonFiniteGradient(
            f"the ranks' gradients of parameter {name} add up to more than a number holds, at step {step:,}; no "
            "parameter was changed: lower the learning rate, or clip"
        )

    def _words_of(self, bucket: int) -> npt.NDArray[Any]:
        where = self._arena.buckets[bucket]
        return self._arena.gradients[where.start : where.stop].view(where.dtype)

    def _first_in(self, bucket: int) -> Finding | None:
        where = self._arena.buckets[bucket]
        for number, slot in enumerate(self._arena.layout.slots):
            if where.start <= slot.start < where.stop:
                gradient = self._arena.gradient(slot)
                if count := gradient.size - int(np.isfinite(gradient).sum()):
                    return Finding(number, count)
        return None

    def _in_words(self, found: Finding, rank: int) -> str:
        slot = self._arena.layout.slots[found.slot]
        many = f"{found.count:,} of {slot.size:,} values are NaN or infinite"
        return f"rank {rank}'s gradient of parameter {slot.name} is not finite at step {self._step:,} ({many})"


class Unguarded(Guard):
    """Of a synchronizer whose user has not asked for another one: it looks at nothing."""

    def __init__(self) -> None:
        self.refuses, self.found, self._looks = False, None, False

    def look(self, bucket: int, step: int) -> bool:  # noqa: ARG002 - as said
        return False


UNGUARDED = Unguarded()
