"""The record of one epoch of the digits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from common.trainer.record import RunRecord


@pytest.fixture(scope="module")
def record() -> RunRecord:
    """Of an epoch of the digits; tests only read it."""
    pytest.importorskip("paddle")
    from common.launch.flags import TrainingConfig
    from tests.support.small_training import run

    return run(TrainingConfig(model="mnist-cnn", batch_size=32)).record
