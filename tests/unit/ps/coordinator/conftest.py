"""A coordinator whose updates are NumPy's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from common.errors import UsageError
from common.tensors.arena import FloatArray
from common.tensors.optimizers import Optimizer
from common.tensors.parts import Accumulator, Part
from common.tensors.updater import StatefulUpdater
from tests.support.numpy_updater import numpy_piece_updater


class NumpyMomentum:
    """v = v / 2 + g; p -= lr * v, for each part that is used."""

    def __init__(self, parameters: FloatArray, gradients: FloatArray, parts: Sequence[Part]) -> None:
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


def numpy_part_updater(
    optimizer: Optimizer, parameters: FloatArray, gradients: FloatArray, parts: Sequence[Part]
) -> StatefulUpdater:
    """Stands in for `make_part_updater`."""
    return NumpyMomentum(parameters, gradients, parts)


@pytest.fixture(autouse=True, scope="module")
def _without_paddle() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ps.store.sync_store.make_piece_updater", numpy_piece_updater)
        patch.setattr("ps.store.program_updates.make_part_updater", numpy_part_updater)
        patch.setattr("ps.store.make.PIECE", 32)
        yield
