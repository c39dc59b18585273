"""Threads take turns more often while ranks meet, and otherwise as often as the program has it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from common.system.switching import OFTEN_S, switching_often

often = pytest.approx(OFTEN_S)


@pytest.fixture(autouse=True)
def of_python() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def test_within_it_is_often_and_then_as_before_also_after_an_error() -> None:
    with switching_often():
        assert sys.getswitchinterval() == often
        with switching_often():
            pass
        assert sys.getswitchinterval() == often
    assert sys.getswitchinterval() == pytest.approx(0.005)
    with pytest.raises(ValueError, match="stop"), switching_often():
        raise ValueError("stop")
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_who_comes_first_may_leave_first() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with switching_often():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with switching_often():
        thread.start()
        assert inside.wait(10)
    assert sys.getswitchinterval() == often
    leave.set()
    thread.join()
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_a_program_that_has_them_switch_more_often_keeps_that() -> None:
    sys.setswitchinterval(1e-5)
    with switching_often():
        assert sys.getswitchinterval() == pytest.approx(1e-5)
    assert sys.getswitchinterval() == pytest.approx(1e-5)
