"""A program of the user's whose gradients are not finite: a warning, an error if asked for, nothing under a scaler."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

paddle = pytest.importorskip("paddle")

from common.errors import NonFiniteGradient  # noqa: E402
from common.paddle_api import backward  # noqa: E402
from common.paddle_api.arena_binding import trainable  # noqa: E402
from common.paddle_api.gradient_average import GradientAverage  # noqa: E402
from common.sync.local import LocalSynchronizer  # noqa: E402

WORDS = "rank 0's gradient of parameter bias is not finite at step 1 (2 of 2 values are NaN or infinite)"


@pytest.fixture
def one_step() -> Iterator[Any]:
    """A function that makes a step of a wrapped model with a loss multiplied by this."""
    gc.collect()  # scalers of other tests
    paddle.seed(3)
    model, synchronizer = paddle.nn.Linear(2, 2), LocalSynchronizer()
    made: list[GradientAverage] = []

    def step(factor: float) -> None:
        if not made:
            made.append(GradientAverage(trainable(model), synchronizer, first_bytes=64, bucket_bytes=64))
            made[0].share_parameters()
            backward.listen_to_backward(made[0])
        model.clear_gradients()
        (model(paddle.ones([1, 2])).sum() * factor).backward()

    yield step
    for each in made:
        backward.forget(each)


def test_the_program_goes_on_with_a_warning(one_step: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gone = weakref.proxy(paddle.nn.Linear(1, 1))  # must not be asked whether it is a scaler
    gc.collect()
    for factor in (1.0, float("nan"), float("inf"), 1.0):
        one_step(factor)
    del gone
    assert capsys.readouterr().err == f"gradsync: {WORDS}; the program goes on (--non-finite error stops it)\n"


def test_it_stops_where_that_is_asked_for(one_step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSYNC_NON_FINITE", "error")
    one_step(1.0)
    with pytest.raises(NonFiniteGradient) as caught:
        one_step(float("nan"))
    assert str(caught.value).startswith(f"{WORDS}; no parameter was changed")


@pytest.mark.parametrize("policy", ["auto", "error"])
def test_with_a_scaler_they_are_its_business(
    policy: str, one_step: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADSYNC_NON_FINITE", policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a CPU it turns itself off
        scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)
    scaler._enable = True
    for factor in (1.0, float("nan")):
        one_step(factor)
    assert capsys.readouterr() == ("", "")
