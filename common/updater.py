"""What turns averaged gradients into new parameters, wherever that happens: on ranks or on servers."""

from __future__ import annotations

from typing import Protocol

from common.arena import FloatArray
from common.errors import UsageError
from common.optimizers import Optimizer

__all__ = ["NoUpdate", "Updater", "make_updater"]


class Updater(Protocol):
    """One update at a time; a FlatOptimizer is one."""

    def step(self, learning_rate: float) -> None: ...


class NoUpdate:
    """For gradients that are only averaged: whoever asked for them makes the update."""

    def step(self, learning_rate: float) -> None:
        pass


def make_updater(optimizer: Optimizer | None, parameters: FloatArray, gradients: FloatArray) -> Updater:
    """Paddle's optimizer of that description on the flat buffers, which are kept by reference.

    Raises:
        UsageError: Paddle is not installed here.
    """
    if optimizer is None:
        return NoUpdate()
    try:
        from common.flat_optimizer import FlatOptimizer
    except ImportError as exc:
        raise UsageError(
            f"cannot apply {optimizer.name} here: Paddle is not installed; pip install paddlepaddle"
        ) from exc
    return FlatOptimizer(optimizer, parameters, gradients)
