"""A rank that its launcher ends: Paddle's handler is taken away, the program's own is kept."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.launch.settings import Placement
from common.paddle_api.fleet_api import FleetApi
from common.sync.local import LocalSynchronizer
from common.sync.synchronizer import Synchronizer
from common.system.process import PARENT_VARIABLE


def is_caught() -> bool:
    """Whether the kernel knows of a handler of SIGTERM, Python's or not."""
    (caught,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.fixture
def as_paddle_does() -> Iterator[None]:
    """A handler in C, of which Python's `signal` does not know."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(signal.SIGTERM)
    yield
    faulthandler.unregister(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


def alone(_: Placement) -> Synchronizer:
    return LocalSynchronizer()


@pytest.mark.usefixtures("as_paddle_does")
def test_under_a_launcher_only_the_programs_own_handler_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT_VARIABLE, raising=False)
    FleetApi("ps", alone)
    assert is_caught()
    monkeypatch.setenv(PARENT_VARIABLE, "1")
    FleetApi("ps", alone)
    assert not is_caught()
    mine = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGTERM, mine)
    FleetApi("ps", alone)
    assert signal.getsignal(signal.SIGTERM) is mine
    assert is_caught()
