"""Paddle's own optimizers on flat buffers: one update for a whole run of parameters.

Bitwise equal to Paddle's per-parameter updates for SGD, Momentum, Adam and AdamW. Adagrad and RMSProp differ by
rounding in a parameter's last few elements, where Paddle's kernels leave the vector loop. Cut at multiples of 16
elements, as servers cut them, all are equal to the whole.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase

from common.arena import FloatArray
from common.optimizers import OPTIMIZERS, Optimizer

__all__ = ["FlatOptimizer", "as_tensor"]

CLASSES = {
    name: getattr(paddle.optimizer, kind.__name__) for name, kind in OPTIMIZERS.items()
}  # "adam" -> paddle.optimizer.Adam


def as_tensor(array: FloatArray) -> Any:
    """A Paddle CPU tensor that shares `array`'s memory (which the caller keeps alive); Paddle 2.6 and 3.x."""
    return paddle.base.core.eager.Tensor(value=array, place=paddle.CPUPlace(), zero_copy=True)


class FlatOptimizer:
    """Updates `parameters` in place from `gradients`; both 1-D float32 of equal length, kept by reference."""

    def __init__(self, description: Optimizer, parameters: FloatArray, gradients: FloatArray) -> None:
        if parameters.shape != gradients.shape:
            raise ValueError(
                f"parameters and gradients must be of equal shape (got {parameters.shape}, {gradients.shape})"
            )
        self._keep_alive = (parameters, gradients)
        self._empty = parameters.size == 0  # a server may own nothing
        if self._empty:
            return
        settings = asdict(description)
        if not settings["weight_decay"] and description.name != "adamw":
            del settings["weight_decay"]  # Paddle would spend a pass on adding zero times the parameters
        with paddle.utils.unique_name.guard():
            self._parameter = EagerParamBase(shape=[parameters.size], dtype="float32", name="flat")
            as_tensor(parameters)._share_buffer_to(self._parameter)
            self._parameter._copy_gradient_from(as_tensor(gradients))  # attaches, despite its name
            self._paddle = CLASSES[description.name](parameters=[self._parameter], **settings)

    def step(self, learning_rate: float) -> None:
        """One update at this learning rate."""
        if self._empty:
            return
        self._paddle.set_lr(learning_rate)
        with paddle.utils.unique_name.guard():  # the first step names the moments
            self._paddle.step()

    def state_elements(self) -> int:
        """How many numbers the optimizer keeps beside the parameters (moments and the like)."""
        if self._empty:
            return 0
        return sum(int(np.prod(t.shape)) for t in self._paddle.state_dict().values() if hasattr(t, "shape"))
