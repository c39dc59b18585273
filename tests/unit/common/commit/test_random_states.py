"""Random generators go on where they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from common.commit.parts import Part, from_bytes, to_bytes  # noqa: E402
from common.errors import UsageError  # noqa: E402
from common.paddle_api import random_states  # noqa: E402


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = random_states.random_arrays()
    yield
    random_states.set_random(before)


def draw() -> list[object]:
    dropped = paddle.nn.functional.dropout(paddle.ones([50]))
    words = [paddle.rand([5]), paddle.randint(0, 1000, [5]), paddle.randperm(9), dropped]
    return [
        [random.random(), random.gauss(0, 1), random.sample(range(99), 5)],
        [np.random.rand(3).tolist(), np.random.randn(), np.random.permutation(9).tolist()],
        [word.numpy().tolist() for word in words],
    ]


@pytest.mark.parametrize("drawn", [0, 1, 100])
def test_all_draw_again_what_they_drew(drawn: int) -> None:
    paddle.seed(7)
    for _ in range(drawn):
        draw()
    arrays = from_bytes(to_bytes(Part(random_states.random_arrays()))).arrays
    expected = [draw(), draw()]
    paddle.seed(8)
    draw()
    random_states.set_random(arrays)
    assert [draw(), draw()] == expected
    assert draw() != expected[0]


def test_a_generator_that_cannot_be_kept_is_refused() -> None:
    state = paddle.base.core.default_cpu_generator().get_state()
    *words, last = str(state).split()

    class Other:
        def __str__(self) -> str:
            return " ".join([*words, str(int(last) + 1)])

    with pytest.raises(UsageError, match="cannot be kept"):
        random_states._engine_of(Other())
    with patch.object(random_states, "_engine_of", side_effect=UsageError("no")), pytest.raises(UsageError):
        random_states.random_arrays()
