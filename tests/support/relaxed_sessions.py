"""Trainers under the modes ssp, async and geo."""

from __future__ import annotations

import numpy as np
import pytest

from common.tensors.arena import FloatArray, Layout
from common.tensors.optimizers import Optimizer
from ps.store.modes import ASYNC, Mode

__all__ = ["GEO", "SSP", "LocalSGD", "geo_layout", "relaxed"]

SSP, GEO = Mode("ssp", 2), Mode("geo", 3)
RELAXED = [SSP, ASYNC, GEO]
relaxed = pytest.mark.parametrize("mode", RELAXED, ids=str)


class LocalSGD:
    def __init__(self, optimizer: Optimizer | None, parameters: FloatArray, gradients: FloatArray) -> None:
        self.parameters, self.gradients = parameters, gradients

    def step(self, learning_rate: float, used: bytes = b"") -> None:
        self.parameters -= np.float32(learning_rate) * self.gradients


def geo_layout() -> Layout:
    return Layout.of([("a", (33, 5)), ("b", (7,))])
