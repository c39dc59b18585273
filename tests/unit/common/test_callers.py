"""Callers of whom nothing is known yet: few at a time, and none for long."""

from __future__ import annotations

import threading
import time

from common.network.callers import Callers

LIMIT_S = 20.0


def test_who_has_waited_longest_makes_room() -> None:
    door, turned_away = Callers(most=2), []
    with door.waits(lambda: turned_away.append("first")), door.waits(lambda: turned_away.append("second")):
        assert turned_away == []
        with door.waits(lambda: turned_away.append("third")):
            assert turned_away == ["first"]
        with door.waits(lambda: turned_away.append("fourth")):
            assert turned_away == ["first"]


def test_who_takes_too_long_is_turned_away_in_time() -> None:
    gone, begin = threading.Event(), time.monotonic()
    with Callers(seconds=0.2).waits(gone.set):
        assert gone.wait(LIMIT_S)
    assert 0.2 <= time.monotonic() - begin < LIMIT_S / 2


def test_who_is_known_in_time_is_left_alone() -> None:
    door, turned_away, later = Callers(seconds=0.1), [], threading.Event()
    with door.waits(lambda: turned_away.append("first")):
        pass
    with door.waits(later.set):
        assert later.wait(LIMIT_S)
    assert turned_away == []
