"""A model wrapped by the average of a synchronizer that doubles."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def wrapped() -> Any:
    """(model, its average over a Twice with tiny buckets, the synchronizer), unhooked at the end."""
    paddle = pytest.importorskip("paddle")
    from common.paddle_api import backward
    from common.paddle_api.arena_binding import trainable
    from common.paddle_api.gradient_average import GradientAverage
    from tests.support.paddle_models import Branches, Twice

    paddle.seed(3)
    model, synchronizer = Branches(), Twice()
    average = GradientAverage(trainable(model), synchronizer, first_bytes=64, bucket_bytes=64)
    average.share_parameters()
    backward.listen_to_backward(average)
    yield model, average, synchronizer
    backward.forget(average)
