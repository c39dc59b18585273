"""A rank that its launcher ends: Paddle's handler is taken away, the program's own is kept. What is held back."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from common.launch.settings import Placement
from common.paddle_api.fleet_api import FleetApi
from common.sync.local import LocalSynchronizer
from common.sync.synchronizer import Synchronizer
from common.system.process import PARENT_VARIABLE
from common.system.sigterm import EndsHeldBack
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
import threading
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


@pytest.fixture
def answered() -> Iterator[list[int]]:
    """SIGTERMs that this process, in which another thread waits, has answered."""
    answers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: answers.append(number))
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    yield answers
    over.set()
    other.join()
    signal.signal(signal.SIGTERM, before)


def test_what_is_held_back_is_answered_once_when_it_is_released(answered: list[int]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    held = EndsHeldBack()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    assert answered == []
    held.release()
    assert answered == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == handler


def test_it_is_answered_by_whoever_has_come_meanwhile_and_later_by_who_did_before(answered: list[int]) -> None:
    held, others = EndsHeldBack(), []
    os.kill(os.getpid(), signal.SIGTERM)
    inner = EndsHeldBack()
    inner.release()
    ours = signal.signal(signal.SIGTERM, lambda number, _: others.append(number))
    held.release()
    assert (answered, others) == ([], [signal.SIGTERM])
    signal.signal(signal.SIGTERM, ours)
    os.kill(os.getpid(), signal.SIGTERM)
    assert answered == [signal.SIGTERM]


def test_ctrl_c_is_held_back_too() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a worker of pytest's
    try:
        held = EndsHeldBack()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            held.release()
    finally:
        signal.signal(signal.SIGINT, before)
