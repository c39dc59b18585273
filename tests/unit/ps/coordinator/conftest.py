"""A coordinator whose updates are NumPy's, and which looks often for who is silent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kept_memory import memory
from tests.support.numpy_optimizer import instead_of_paddle

__all__ = ["memory"]


@pytest.fixture(autouse=True, scope="module")
def _without_paddle() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        instead_of_paddle(patch)
        patch.setattr("ps.store.make.PIECE", 32)
        patch.setattr("ps.coordinator.frozen_or_slow.WATCH_S", 0.01)
        yield
