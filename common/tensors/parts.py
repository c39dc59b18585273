"""Parts of parameters and pieces of buckets that lie in a slice of the arena, and what an optimizer keeps for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from common.tensors.arena import Layout
from common.tensors.buckets import ALIGNMENT, words

__all__ = ["PADDING", "Accumulator", "Part", "Piece", "is_number", "parts_of", "slot_of_key"]

PADDING = 2 * ALIGNMENT  # words of zeros after a slice that a part updater may use; see Part.padded_stop


@dataclass(frozen=True)
class Piece:
    """Words `start`..`stop` of a slice, all of one bucket."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True)
class Part:
    """What of one parameter lies in a slice of the arena: words `start`..`stop` of the slice, which are the elements
    from `first` on of the `size` elements of slot number `slot`."""

    slot: int
    name: str  # with which the keys of its state begin
    start: int
    stop: int
    first: int
    size: int
    dtype: str

    @property
    def count(self) -> int:
        """Number of elements."""
        return (self.stop - self.start) // words(self.dtype)

    @property
    def padded_stop(self) -> int:
        """Paddle's kernels differ by the size of a parameter modulo the vector width, so a part cut off at its end is
        updated together with so many zeros that this is as for the whole."""
        cut = self.first + self.count < self.size
        return self.stop + self.size % ALIGNMENT * words(self.dtype) * cut


@dataclass(frozen=True)
class Accumulator:
    """A run of one of the numbers or arrays that an optimizer keeps for a parameter: `values`, 1-D, are the elements
    from `first` on of `size`. `key` names it in the state_dict of Paddle's optimizer."""

    key: str
    slot: int
    size: int
    first: int
    values: npt.NDArray[Any]


def parts_of(layout: Layout, names: Sequence[str], start: int, stop: int) -> list[Part]:
    """The parts of parameters in words start..stop of the arena; slots whose name is empty are none."""
    found = []
    for index, (slot, name) in enumerate(zip(layout.slots, names, strict=True)):
        a, b = max(slot.start, start), min(slot.stop, stop)
        if name and a < b:
            first = (a - slot.start) // words(slot.dtype)
            found.append(Part(index, name, a - start, b - start, first, slot.size, slot.dtype))
    return found


def slot_of_key(key: str, names: Sequence[str]) -> int | None:
    """Which parameter an optimizer's state belongs to: the one whose name, and an underscore, the key begins with."""
    found = [index for index, name in enumerate(names) if name and key.startswith(name + "_")]
    return max(found, key=lambda index: len(names[index]), default=None)


def is_number(key: str) -> bool:
    """Whether that part of an optimizer's state is one number a parameter (a power of beta), not one an element."""
    return "_pow_acc" in key
