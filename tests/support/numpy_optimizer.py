"""Stands in for common.tensors.flat_optimizer, so that servers and trainers update without Paddle."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from common.errors import UsageError
from common.tensors.arena import FloatArray
from common.tensors.optimizers import Optimizer
from common.tensors.parts import Accumulator, Part, Piece

__all__ = ["instead_of_paddle"]


class FlatSGD:
    """p -= lr * g."""

    def __init__(self, _: Optimizer, parameters: FloatArray, gradients: FloatArray) -> None:
        self.parameters, self.gradients = parameters, gradients

    def step(self, learning_rate: float, used: bytes = b"") -> None:
        self.parameters -= np.float32(learning_rate) * self.gradients


class PieceSGD:
    """As FlatSGD, a piece at a time; its state is the sum of all gradients."""

    def __init__(self, optimizer: Optimizer, parameters: FloatArray, pieces: Sequence[Piece]) -> None:
        assert isinstance(optimizer, Optimizer)
        self.parameters, self.sums = parameters, np.zeros_like(parameters)
        self.starts = {piece.start for piece in pieces}

    def set_rate(self, learning_rate: float) -> None:
        self.rate = np.float32(learning_rate)

    def step(self, start: int, gradients: FloatArray) -> None:
        assert start in self.starts
        self.parameters[start : start + gradients.size] -= self.rate * gradients
        self.sums[start : start + gradients.size] += gradients

    def arrays(self) -> dict[str, FloatArray]:
        return {"sum_0": self.sums.copy()}

    def load(self, arrays: Mapping[str, FloatArray]) -> None:
        self.sums[...] = arrays["sum_0"]


class PartMomentum:
    """v = v / 2 + g; p -= lr * v, for each part that is used."""

    def __init__(
        self, optimizer: Optimizer, parameters: FloatArray, gradients: FloatArray, parts: Sequence[Part]
    ) -> None:
        assert isinstance(optimizer, Optimizer)
        self.parameters, self.gradients, self.parts = parameters, gradients, parts
        self.velocity: dict[str, FloatArray] = {}

    def step(self, learning_rate: float, used: bytes = b"") -> None:
        for part in self.parts:
            if not used or used[part.slot]:
                gradients = self.gradients[part.start : part.stop]
                v = self.velocity.get(part.name, np.zeros(part.count, np.float32)) / np.float32(2) + gradients
                self.velocity[part.name] = v
                self.parameters[part.start : part.stop] -= np.float32(learning_rate) * v

    def state(self) -> list[Accumulator]:
        parts = [part for part in self.parts if part.name in self.velocity]
        return [Accumulator(f"{p.name}_v", p.slot, p.size, p.first, self.velocity[p.name].copy()) for p in parts]

    def load(self, state: Sequence[Accumulator]) -> None:
        given = {each.key.removesuffix("_v"): each.values for each in state}
        for part in self.parts:
            if part.name not in given:
                raise UsageError(f"the optimizer state does not fit the optimizer: {part.name} not found")
            self.velocity[part.name] = given[part.name]


def instead_of_paddle(patch: pytest.MonkeyPatch, *, flat: type = FlatSGD) -> None:
    """Updates are these classes' from now on. Else the first thread that updates imports Paddle, which then is in
    static mode on all others, where its optimizers fail."""
    classes = SimpleNamespace(FlatOptimizer=flat, PieceOptimizer=PieceSGD, PartOptimizer=PartMomentum)
    patch.setitem(sys.modules, "common.tensors.flat_optimizer", classes)  # type: ignore[arg-type]
