"""What turns averaged gradients into new parameters, wherever that happens: on ranks or on servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

import numpy.typing as npt

from common.errors import UsageError
from common.tensors.arena import FloatArray
from common.tensors.buckets import ALIGNMENT
from common.tensors.optimizers import Optimizer
from common.tensors.parts import Accumulator, Part, Piece

__all__ = [
    "WORTH_HELP",
    "FlatUpdater",
    "NoUpdate",
    "PieceUpdater",
    "StatefulUpdater",
    "Together",
    "Updater",
    "make_flat_updater",
    "make_part_updater",
    "make_piece_updater",
    "make_updater",
]


WORTH_HELP = 1 << 19  # words; handing half of a smaller buffer to another thread takes longer than it saves


class Updater(Protocol):
    """One update at a time; a FlatOptimizer is one.

    `used` has a byte for each slot of the layout, zero if no rank's backward has reached it; empty: all are.
    """

    def step(self, learning_rate: float, used: bytes = b"") -> None: ...


class StatefulUpdater(Updater, Protocol):
    """An updater whose state can be saved and loaded; a PartOptimizer is one."""

    def state(self) -> list[Accumulator]: ...

    def load(self, state: Sequence[Accumulator]) -> None: ...


class FlatUpdater(Updater, Protocol):
    """An updater of flat buffers whose state commits keep; a FlatOptimizer is one."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of what it keeps beside the parameters, 1-D, by kind: as many values as there are parameters, or
        one."""
        ...

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from what `arrays` gave, before the first step."""
        ...


class NoUpdate:
    """For gradients that are only averaged: whoever asked for them makes the update."""

    def step(self, learning_rate: float, used: bytes = b"") -> None:
        pass

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {}

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
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


class PieceUpdater(Protocol):
    """Updates the pieces of a slice one by one, from any thread; a PieceOptimizer is one."""

    def set_rate(self, learning_rate: float) -> None: ...

    def step(self, start: int, gradients: FloatArray) -> None: ...

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """As of FlatUpdater, of all pieces together."""
        ...

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None: ...


def make_flat_updater(optimizer: Optimizer | None, parameters: FloatArray, gradients: FloatArray) -> FlatUpdater:
    """Paddle's optimizer of that description on the flat buffers, which are kept by reference.

    Raises:
        UsageError: Paddle is not installed here.
    """
    if optimizer is None:
        return NoUpdate()
    try:
        from common.tensors.flat_optimizer import FlatOptimizer
    except ImportError as exc:
        raise _no_paddle(optimizer) from exc
    return FlatOptimizer(optimizer, parameters, gradients)


def make_updater(
    optimizer: Optimizer | None, parameters: FloatArray, gradients: FloatArray, *, helper: Executor | None = None
) -> Updater:
    """As `make_flat_updater`.

    Args:
        helper: a thread that updates the second half of large buffers; the same bits, for they are cut at a multiple
            of ALIGNMENT.

    Raises:
        UsageError: Paddle is not installed here.
    """
    if optimizer is None or helper is None or parameters.size < WORTH_HELP:
        return make_flat_updater(optimizer, parameters, gradients)
    middle = parameters.size // 2 // ALIGNMENT * ALIGNMENT
    halves = (slice(middle), slice(middle, None))
    first, second = (make_flat_updater(optimizer, parameters[half], gradients[half]) for half in halves)
    return Together(first, second, helper)


def make_piece_updater(optimizer: Optimizer, parameters: FloatArray, pieces: Sequence[Piece]) -> PieceUpdater:
    """Paddle's optimizer of that description on pieces of the flat buffer; the same bits as on the whole, for pieces
    begin at multiples of ALIGNMENT.

    Raises:
        UsageError: Paddle is not installed here.
    """
    try:
        from common.tensors.flat_optimizer import PieceOptimizer
    except ImportError as exc:
        raise _no_paddle(optimizer) from exc
    return PieceOptimizer(optimizer, parameters, pieces)


def make_part_updater(
    optimizer: Optimizer, parameters: FloatArray, gradients: FloatArray, parts: Sequence[Part]
) -> StatefulUpdater:
    """Paddle's optimizer of that description on parts of the flat buffers, parameter by parameter.

    Raises:
        UsageError: Paddle is not installed here.
    """
    try:
        from common.tensors.flat_optimizer import PartOptimizer
    except ImportError as exc:
        raise _no_paddle(optimizer) from exc
    return PartOptimizer(optimizer, parameters, gradients, parts)


def _no_paddle(optimizer: Optimizer) -> UsageError:
    return UsageError(
        f"cannot apply {optimizer.name} here: Paddle is not installed; pip install paddlepaddle, "
        "or let the trainers update with --update trainer"
    )
