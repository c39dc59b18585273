"""What turns averaged gradients into new parameters, wherever that happens: on ranks or on servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Protocol

from common.errors import UsageError
from common.system.memory import aligned_empty
from common.tensors.arena import FloatArray
from common.tensors.buckets import ALIGNMENT
from common.tensors.optimizers import Optimizer
from common.tensors.parts import Accumulator, Part, Piece

__all__ = [
    "WORTH_HELP",
    "InPieces",
    "NoUpdate",
    "PieceUpdater",
    "StatefulUpdater",
    "Together",
    "Updater",
    "make_part_updater",
    "make_piece_updater",
    "make_updater",
]


WORTH_HELP = 1 << 19  # words; handing half of a smaller buffer to another thread takes longer than it saves
PIECES_WORTH_HELP = 4  # likewise


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


class PieceUpdater(Protocol):
    """Updates the pieces of a slice one by one, from any thread; a PieceOptimizer is one."""

    def set_rate(self, learning_rate: float) -> None: ...

    def step(self, start: int, gradients: FloatArray) -> None: ...


class InPieces:
    """The update of a slice piece by piece: each is averaged into a buffer that stays in a core's cache, and updated
    from there. It can be before the gradients of the others are there, once a step each.

    Args:
        longest: words of the longest piece.
        helper: a thread that takes its part of the pieces.
    """

    def __init__(self, updater: PieceUpdater, longest: int, *, helper: Executor | None = None) -> None:
        self._updater, self._helper = updater, helper
        self._gradients = [aligned_empty(longest) for _ in range(1 if helper is None else 2)]

    def step(self, learning_rate: float, pieces: Sequence[Piece], average: Callable[[Piece, FloatArray], None]) -> None:
        """Update these pieces.

        Args:
            average: writes a piece's averaged gradients to an array of its length; called from both threads.
        """
        self._updater.set_rate(learning_rate)
        left = iter(pieces)  # for both threads: who is done with one takes the next
        if self._helper is None or len(pieces) < PIECES_WORTH_HELP:
            self._work(left, average, self._gradients[0])
            return
        other = self._helper.submit(self._work, left, average, self._gradients[1])
        try:
            self._work(left, average, self._gradients[0])
        finally:
            other.result()

    def _work(
        self, pieces: Iterator[Piece], average: Callable[[Piece, FloatArray], None], gradients: FloatArray
    ) -> None:
        for piece in pieces:
            mine = gradients[: piece.stop - piece.start]
            average(piece, mine)
            self._updater.step(piece.start, mine)


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
        from common.tensors.flat_optimizer import FlatOptimizer
    except ImportError as exc:
        raise _no_paddle(optimizer) from exc
    if helper is None or parameters.size < WORTH_HELP:
        return FlatOptimizer(optimizer, parameters, gradients)
    middle = parameters.size // 2 // ALIGNMENT * ALIGNMENT
    halves = (slice(middle), slice(middle, None))
    first, second = (FlatOptimizer(optimizer, parameters[half], gradients[half]) for half in halves)
    return Together(first, second, helper)


def make_piece_updater(
    optimizer: Optimizer, parameters: FloatArray, pieces: Sequence[Piece], *, helper: Executor | None = None
) -> InPieces:
    """Paddle's optimizer of that description on pieces of the flat buffer; the same bits as on the whole, for pieces
    begin at multiples of ALIGNMENT.

    Raises:
        UsageError: Paddle is not installed here.
    """
    try:
        from common.tensors.flat_optimizer import PieceOptimizer
    except ImportError as exc:
        raise _no_paddle(optimizer) from exc
    longest = max((piece.stop - piece.start for piece in pieces), default=0)
    return InPieces(PieceOptimizer(optimizer, parameters, pieces), longest, helper=helper)


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
