"""What turns averaged gradients into new parameters, wherever that happens: on ranks or on servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from common.arena import FloatArray, Layout
from common.buckets import ALIGNMENT, words
from common.errors import UsageError
from common.optimizers import Optimizer

__all__ = [
    "PADDING",
    "WORTH_HELP",
    "Accumulator",
    "InPieces",
    "NoUpdate",
    "Part",
    "StatefulUpdater",
    "Together",
    "Updater",
    "is_number",
    "make_part_updater",
    "make_updater",
    "parts_of",
    "slot_of_key",
]


WORTH_HELP = 1 << 19  # words; handing half of a smaller buffer to another thread takes longer than it saves
PADDING = 2 * ALIGNMENT  # words of zeros after a slice that a part updater may use; see Part.padded_stop


class Updater(Protocol):
    """One update at a time; a FlatOptimizer is one.

    `used` has a byte for each slot of the layout, zero if no rank's backward has reached it; empty: all are.
    """

    def step(self, learning_rate: float, used: bytes = b"") -> None: ...


class StatefulUpdater(Updater, Protocol):
    """An updater whose state can be saved and loaded; a PartOptimizer is one."""

    def state(self) -> list[Accumulator]: ...

    def load(self, state: Sequence[Accumulator]) -> None: ...


class NoUpdate:
    """For gradients that are only averaged: whoever asked for them makes the update."""

    def step(self, learning_rate: float, used: bytes = b"") -> None:
        pass


class Together:
    """Two updaters of slices that do not overlap, at the same time: the second on the helper's thread."""

    def __init__(self, first: Updater, second: Updater, helper: Executor) -> None:
        self._first, self._second, self._helper = first, second, helper

    def step(self, learning_rate: float, used: bytes = b"") -> None:
        other = self._helper.submit(self._second.step, learning_rate, used)
        try:
            self._first.step(learning_rate, used)
        finally:
            other.result()


class InPieces:
    """Updaters of the consecutive pieces of a slice, by the word at which each begins: a piece can be updated before
    the gradients of the others are there, once a step each."""

    def __init__(self, updaters: Mapping[int, Updater]) -> None:
        self._updaters = updaters

    def step(self, learning_rate: float, used: bytes = b"") -> None:
        for updater in self._updaters.values():
            updater.step(learning_rate, used)

    def step_piece(self, start: int, learning_rate: float) -> None:
        self._updaters[start].step(learning_rate)


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


def make_updater(
    optimizer: Optimizer | None, parameters: FloatArray, gradients: FloatArray, *, helper: Executor | None = None
) -> Updater:
    """Paddle's optimizer of that description on the flat buffers, which are kept by reference.

    Args:
        helper: a thread that updates the second half of large buffers; the same bits, for they are cut at a multiple
            of ALIGNMENT.

    Raises:
        UsageError: Paddle is not installed here.
    """
    if optimizer is None:
        return NoUpdate()
    try:
        from common.flat_optimizer import FlatOptimizer
    except ImportError as exc:
        raise _no_paddle(optimizer) from exc
    if helper is None or parameters.size < WORTH_HELP:
        return FlatOptimizer(optimizer, parameters, gradients)
    middle = parameters.size // 2 // ALIGNMENT * ALIGNMENT
    halves = (slice(middle), slice(middle, None))
    first, second = (FlatOptimizer(optimizer, parameters[half], gradients[half]) for half in halves)
    return Together(first, second, helper)


def make_part_updater(
    optimizer: Optimizer, parameters: FloatArray, gradients: FloatArray, parts: Sequence[Part]
) -> StatefulUpdater:
    """Paddle's optimizer of that description on parts of the flat buffers, parameter by parameter.

    Raises:
        UsageError: Paddle is not installed here.
    """
    try:
        from common.flat_optimizer import PartOptimizer
    except ImportError as exc:
        raise _no_paddle(optimizer) from exc
    return PartOptimizer(optimizer, parameters, gradients, parts)


def _no_paddle(optimizer: Optimizer) -> UsageError:
    return UsageError(
        f"cannot apply {optimizer.name} here: Paddle is not installed; pip install paddlepaddle, "
        "or let the trainers update with --update trainer"
    )
