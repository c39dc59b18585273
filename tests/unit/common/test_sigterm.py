"""A rank that its launcher ends: Paddle's handler is taken away, the program's own is kept."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from common.launch.settings import Placement
from common.paddle_api.fleet_api import FleetApi
from common.sync.local import LocalSynchronizer
from common.sync.synchronizer import Synchronizer
from common.system.process import PARENT_VARIABLE
from tests.support.groups import ROOT
from tests.support.signals import is_caught


@pytest.fixture
def as_paddle_does() -> Iterator[None]:
    """A handler in C, of which Python's `signal` does not know."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(signal.SIGTERM)
    yield
    faulthandler.unregister(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


WHILE_IMPORTING = """
import sys
from common.system.process import prepare_process
from tests.support.signals import is_caught

class Looks:
    seen = []
    def find_spec(self, name, path, target=None):
        self.seen.append(is_caught())

prepare_process()
sys.meta_path.insert(0, Looks())
import paddle
paddle.ones([2]).sum()
print(len(Looks.seen), sum(Looks.seen), is_caught())
"""


@pytest.mark.processes
def test_paddles_handler_is_taken_away_as_soon_as_it_is_there() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WHILE_IMPORTING],
        env={**os.environ, PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    looks, caught, at_end = done.stdout.split()
    assert int(looks) > 300
    assert int(caught) <= 2
    assert at_end == "False"


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
