"""One rank's flat parameter and gradient buffers, and where each parameter lies in them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from common.buckets import Bucket, align, plan_buckets
from common.memory import aligned_empty

__all__ = ["Arena", "FloatArray", "Layout", "Slot", "sha256_of_parameters"]

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies: `size` elements from `start` on, then padding up to 64 bytes."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Layout:
    """The slots in arena order, and the arena's length in elements."""

    slots: tuple[Slot, ...]
    length: int

    @staticmethod
    def of(named_shapes: Iterable[tuple[str, Sequence[int]]]) -> Layout:
        """Lay the parameters out one after the other, each starting on a cache line."""
        slots: list[Slot] = []
        cursor = 0
        for name, shape in named_shapes:
            slots.append(Slot(name, tuple(shape), cursor))
            cursor = align(slots[-1].stop)
        return Layout(tuple(slots), cursor)

    def difference(self, other: Layout) -> str | None:
        """The first disagreement in words, or None if both are equal."""
        for mine, theirs in zip(self.slots, other.slots, strict=False):
            if mine != theirs:
                return f"parameter {mine.name} {list(mine.shape)} against {theirs.name} {list(theirs.shape)}"
        if len(self.slots) != len(other.slots):
            return f"{len(self.slots)} parameters against {len(other.slots)}"
        if self.length != other.length:
            return f"arenas of {self.length} against {other.length} elements"
        return None

    def slots_between(self, start: int, stop: int) -> tuple[Slot, ...]:
        """The parameters that lie, wholly or in part, in elements start..stop."""
        return tuple(slot for slot in self.slots if slot.start < stop and slot.stop > start)


class Arena:
    """`parameters` and `gradients`: 1-D float32 arrays of `layout.length` elements, 64-byte aligned.

    Padding between parameters is zero and stays zero: every optimizer maps a zero gradient and a zero
    parameter to zero.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        buckets: tuple[Bucket, ...] | None = None,
        empty: Callable[[int], npt.NDArray[Any]] = aligned_empty,
    ) -> None:
        self.layout = layout
        self.buckets = plan_buckets([s.start for s in layout.slots], layout.length) if buckets is None else buckets
        self.parameters: FloatArray = empty(layout.length)
        self.gradients: FloatArray = empty(layout.length)
        self.parameters.fill(0)
        self.gradients.fill(0)

    def parameter(self, slot: Slot) -> FloatArray:
        """The parameter of a slot in its shape, as a view."""
        return self.parameters[slot.start : slot.stop].reshape(slot.shape)


def sha256_of_parameters(named: Iterable[tuple[str, npt.NDArray[Any]]]) -> str:
    """Digest of name, shape, dtype and bytes of each array in the given (state_dict) order, no padding."""
    digest = hashlib.sha256()
    for name, array in named:
        digest.update(f"{name}|{list(array.shape)}|{array.dtype.str}|".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
