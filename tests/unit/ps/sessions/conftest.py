"""Servers update with NumPy, and no thread of a session is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.numpy_optimizer import instead_of_paddle
from tests.support.sessions import DEADLINE_S


@pytest.fixture(autouse=True)
def _without_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of_paddle(monkeypatch)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Every thread of ours, and every sender of gRPC's, ends with its client or server."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + DEADLINE_S
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("gradsync-") or "consume_request_iterator" in thread.name:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"{thread.name} is left"
