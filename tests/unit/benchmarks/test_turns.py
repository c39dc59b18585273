"""Turns: one thread at a time, by a clock of its own, and all of them end."""

from __future__ import annotations

import threading

import pytest

from benchmarks.faults.simulated import PromiseBroken
from benchmarks.faults.turns import Actor, Turns


def test_who_sleeps_runs_in_the_order_of_the_clock() -> None:
    told = [(0.0, "")] * 0
    with Turns() as turns:

        def actor(name: str, seconds: float) -> Actor:
            def main() -> None:
                for _ in range(2):
                    turns.sleep(mine, seconds)
                    told.append((turns.now, name))

            mine = Actor(turns, main)
            return mine

        turns.add(actor("a", 2.0), 0.0)
        turns.add(actor("b", 3.0), 0.0)
        turns.run()
    assert told == [(2.0, "a"), (3.0, "b"), (4.0, "a"), (6.0, "b")]


def test_who_is_killed_does_nothing_more_and_who_is_frozen_nothing_until_then() -> None:
    told = [(0.0, "")] * 0
    with Turns() as turns:

        def actor(name: str) -> Actor:
            def main() -> None:
                turns.sleep(mine, 1.0)
                told.append((turns.now, name))

            mine = Actor(turns, main)
            turns.add(mine, 0.0)
            return mine

        def happen() -> None:
            killed.is_killed = True
            frozen.frozen_until = 7.0

        killed, frozen = actor("killed"), actor("frozen")
        turns.at(0.5, happen)
        turns.run()
    assert told == [(7.0, "frozen")]


def test_an_error_ends_all_and_is_raised() -> None:
    before = threading.active_count()
    with Turns() as turns:
        waiting = Actor(turns, lambda: turns.wait(waiting))
        failing = Actor(turns, lambda: print(1 // 0))
        turns.add(waiting, 0.0)
        turns.add(failing, 1.0)
        with pytest.raises(ZeroDivisionError):
            turns.run()
    assert threading.active_count() == before


def test_who_never_comes_to_an_end_waits_for_ever() -> None:
    with Turns() as turns:

        def poll() -> None:
            while True:
                turns.sleep(polling, 1.0)

        polling = Actor(turns, poll)
        turns.add(polling, 0.0)
        with pytest.raises(PromiseBroken, match=r"^somebody waits for ever: \d+ events in 601 s$"):
            turns.run()
