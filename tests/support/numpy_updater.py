"""An update in NumPy, for tests of servers that need no Paddle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.tensors.arena import FloatArray
from common.tensors.optimizers import Optimizer
from common.tensors.parts import Piece
from common.tensors.updater import PieceUpdater


class NumpySGD:
    """p -= lr * g."""

    def __init__(self, parameters: FloatArray) -> None:
        self.parameters = parameters

    def set_rate(self, learning_rate: float) -> None:
        self.rate = np.float32(learning_rate)

    def step(self, start: int, gradients: FloatArray) -> None:
        self.parameters[start : start + gradients.size] -= self.rate * gradients


def numpy_piece_updater(optimizer: Optimizer, parameters: FloatArray, pieces: Sequence[Piece]) -> PieceUpdater:
    """Stands in for `make_piece_updater`, so that no Paddle is needed."""
    return NumpySGD(parameters)
