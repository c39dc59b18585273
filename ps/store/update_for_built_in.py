"""The update of a shard piece by piece: each is averaged into a core's cache, and the optimizer reads it there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor

from common.system.memory import aligned_empty
from common.tensors.arena import FloatArray
from common.tensors.parts import Piece
from common.tensors.updater import PieceUpdater
from ps.store.contributions import Contributions

__all__ = ["UpdateInPieces"]

WORTH_HELP = 4  # pieces; handing part of fewer to another thread takes longer than it saves


class UpdateInPieces:
    """Averages pieces and applies the optimizer to them, in any order, each once a step.

    Args:
        contributions: the gradients.
        optimizer: of the parameters; called from both threads.
        helper: a thread that takes its part of the pieces.
    """

    def __init__(
        self, contributions: Contributions, optimizer: PieceUpdater, *, helper: Executor | None = None
    ) -> None:
        self._contributions, self._optimizer, self._helper = contributions, optimizer, helper
        longest = max((piece.stop - piece.start for piece in contributions.pieces()), default=0)
        self._buffers = [aligned_empty(longest) for _ in range(1 if helper is None else 2)]

    @property
    def optimizer(self) -> PieceUpdater:
        """Of the whole slice."""
        return self._optimizer

    def apply(self, learning_rate: float, pieces: Sequence[Piece]) -> None:
        """Average and update these pieces."""
        self._optimizer.set_rate(learning_rate)
        left = iter(pieces)  # for both threads: who is done with one takes the next
        if self._helper is None or len(pieces) < WORTH_HELP:
            self._work(left, self._buffers[0])
            return
        other = self._helper.submit(self._work, left, self._buffers[1])
        try:
            self._work(left, self._buffers[0])
        finally:
            other.result()

    def _work(self, pieces: Iterator[Piece], buffer: FloatArray) -> None:
        for piece in pieces:
            average = buffer[: piece.stop - piece.start]
            self._contributions.average(piece, average)
            self._optimizer.step(piece.start, average)
