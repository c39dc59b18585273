"""Two threads share an update."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from common.system.memory import aligned_empty  # noqa: E402
from common.tensors.optimizers import OPTIMIZERS, make_optimizer  # noqa: E402
from common.tensors.updater import WORTH_HELP, NoUpdate, Together, make_updater  # noqa: E402


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_halves_at_the_same_time_give_the_same_bits(name: str) -> None:
    description = make_optimizer(name, {})
    size = WORTH_HELP + 48
    start = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    arrays = [(aligned_empty(size), aligned_empty(size)) for _ in range(2)]
    with ThreadPoolExecutor(1) as helper:
        updaters = [make_updater(description, *arrays[0]), make_updater(description, *arrays[1], helper=helper)]
        assert isinstance(updaters[1], Together)
        for parameters, _ in arrays:
            parameters[...] = start
        for step in range(3):
            for (_, gradients), updater in zip(arrays, updaters, strict=True):
                gradients[...] = np.random.default_rng(step).standard_normal(size)
                updater.step(0.01 / (1 + step))
    assert arrays[0][0].tobytes() == arrays[1][0].tobytes()
    assert (arrays[0][0] != start).any()


def test_an_error_in_either_half_is_raised() -> None:
    class Fails:
        def step(self, learning_rate: float, used: bytes = b"") -> None:
            raise ZeroDivisionError

    with ThreadPoolExecutor(1) as helper:
        for pair in ((Fails(), NoUpdate()), (NoUpdate(), Fails())):
            with pytest.raises(ZeroDivisionError):
                Together(*pair, helper).step(0.1)
