"""One rank's flat parameter and gradient buffers, and where each parameter lies in them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from common.system.memory import aligned_empty
from common.tensors.buckets import Bucket, align, plan_buckets, words

__all__ = ["Arena", "FloatArray", "Layout", "Slot", "sha256_of_parameters"]

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies: from word `start` to `stop` of the arena, then padding up to 64 bytes."""

    name: str
    shape: tuple[int, ...]
    start: int
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Number of elements, which for float64 is half the number of words."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size * words(self.dtype)

    def describe(self) -> str:
        return f"{self.name} {list(self.shape)}" + ("" if self.dtype == "float32" else f" {self.dtype}")


@dataclass(frozen=True)
class Layout:
    """The slots in arena order, and the arena's length in words."""

    slots: tuple[Slot, ...]
    length: int

    @staticmethod
    def of(named_shapes: Iterable[tuple[str, Sequence[int]]], dtype: str = "float32") -> Layout:
        """Lay the parameters out one after the other, each starting on a cache line."""
        return Layout((), 0).then(named_shapes, dtype)

    def then(self, named_shapes: Iterable[tuple[str, Sequence[int]]], dtype: str) -> Layout:
        """This layout with more parameters, of another dtype, after it."""
        slots = list(self.slots)
        cursor = self.length
        for name, shape in named_shapes:
            slots.append(Slot(name, tuple(shape), cursor, dtype))
            cursor = align(slots[-1].stop)
        return Layout(tuple(slots), cursor)

    def plan(self, **limits: int) -> tuple[Bucket, ...]:
        """The bucket plan: from the end to the start, no bucket with two dtypes in it; see `plan_buckets`."""
        found: list[Bucket] = []
        stop = self.length
        for dtype, slots in reversed([(d, list(s)) for d, s in groupby(self.slots, lambda slot: slot.dtype)]):
            starts = [slot.start for slot in slots]
            found += plan_buckets(starts, stop, dtype=dtype, **limits)
            stop = starts[0]
        return tuple(found)

    def difference(self, other: Layout) -> str | None:
        """The first disagreement in words, or None if both are equal."""
        for mine, theirs in zip(self.slots, other.slots, strict=False):
            if mine != theirs:
                return f"parameter {mine.describe()} against {theirs.describe()}"
        if len(self.slots) != len(other.slots):
            return f"{len(self.slots)} parameters against {len(other.slots)}"
        if self.length != other.length:
            return f"arenas of {self.length} against {other.length} words"
        return None

    def slots_between(self, start: int, stop: int) -> tuple[Slot, ...]:
        """The parameters that lie, wholly or in part, in words start..stop."""
        return tuple(slot for slot in self.slots if slot.start < stop and slot.stop > start)


class Arena:
    """`parameters` and `gradients`: 1-D float32 arrays of `layout.length` words, 64-byte aligned.

    A word is four bytes: one float32, or half a float64 where a slot or bucket says so. Padding between parameters is
    zero and stays zero: every optimizer maps a zero gradient and a zero parameter to zero.

    Args:
        empty: makes the arrays.
        given: the arrays themselves.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        buckets: tuple[Bucket, ...] | None = None,
        empty: Callable[[int], npt.NDArray[Any]] = aligned_empty,
        given: tuple[FloatArray, FloatArray] | None = None,
    ) -> None:
        self.layout = layout
        self.buckets = layout.plan() if buckets is None else buckets
        if given is None:
            given = empty(layout.length), empty(layout.length)
            for array in given:
                array.fill(0)
        self.parameters, self.gradients = given

    def parameter(self, slot: Slot) -> npt.NDArray[Any]:
        """The parameter of a slot in its shape, as a view."""
        return self.parameters[slot.start : slot.stop].view(slot.dtype).reshape(slot.shape)

    def gradient(self, slot: Slot) -> npt.NDArray[Any]:
        """The gradient of a slot in its shape, as a view."""
        return self.gradients[slot.start : slot.stop].view(slot.dtype).reshape(slot.shape)


def sha256_of_parameters(named: Iterable[tuple[str, npt.NDArray[Any]]]) -> str:
    """Digest of name, shape, dtype and bytes of each array in the given (state_dict) order, no padding."""
    digest = hashlib.sha256()
    for name, array in named:
        digest.update(f"{name}|{list(array.shape)}|{array.dtype.str}|".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
