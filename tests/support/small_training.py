"""Trainings of one rank that take no time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from common.launch.flags import TrainingConfig  # noqa: E402
from common.sync.local import LocalSynchronizer  # noqa: E402
from common.trainer.training import TrainedModel, train  # noqa: E402

__all__ = ["SMALL", "Half", "run"]

SMALL = TrainingConfig(model="mlp:16", batch_size=480, steps=5, lr=0.01)  # 3 steps an epoch


def run(config: TrainingConfig = SMALL, **options: Any) -> TrainedModel:
    with LocalSynchronizer() as synchronizer:
        return train(config, synchronizer, **options)


class Half(LocalSynchronizer):
    """One of two ranks that never hears of the other."""

    nranks = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.told: list[int] = []

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        self.told.append(int(values[0]))
        return np.stack([values, values * 0])
