"""Who is ahead is not read from, until the slowest has come near or has sent nothing for too long."""

from __future__ import annotations

import pytest

from ps.planes.even_pace import AHEAD_BYTES, NEAR_AHEAD_BYTES, PATIENCE_S, EvenPace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Trainers:
    """Three of them, and who was woken."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.pace, self.woken = EvenPace(self.clock), list[int]()
        for rank in range(3):
            self.pace.seat(rank)

    def may_send(self, rank: int) -> bool:
        return self.pace.may_send(rank, lambda: self.woken.append(rank))


@pytest.fixture
def three() -> Trainers:
    return Trainers()


def test_who_is_ahead_is_held_up_until_the_slowest_comes_near(three: Trainers) -> None:
    three.pace.has_sent(0, AHEAD_BYTES)
    assert three.may_send(0)
    three.pace.has_sent(0, 1)
    assert not three.may_send(0)
    three.pace.has_sent(1, AHEAD_BYTES)
    assert three.woken == []
    three.pace.has_sent(2, 1)
    assert three.woken == [0]
    assert three.may_send(0)


def test_the_slowest_is_never_held_up(three: Trainers) -> None:
    for rank in (0, 1):
        three.pace.has_sent(rank, 100 * AHEAD_BYTES)
    assert [three.may_send(rank) for rank in range(3)] == [False, False, True]


def test_for_a_trainer_that_sends_nothing_nobody_waits_for_long(three: Trainers) -> None:
    """So that all others' commits are heard, and only who is at fault is named."""
    three.clock.now += 7.0
    for rank in range(3):
        three.pace.has_sent(rank, 1)
    three.pace.has_sent(0, AHEAD_BYTES + 1)
    three.clock.now += PATIENCE_S - 0.01
    assert not three.may_send(0)
    three.clock.now += 0.01
    assert three.may_send(0)
    three.pace.has_sent(0, AHEAD_BYTES)
    assert three.may_send(0)  # piece after piece
    for rank in (1, 2):
        three.pace.has_sent(rank, 1)
    assert not three.may_send(0)


def test_on_one_host_a_trainer_may_be_further_ahead() -> None:
    pace, woken = EvenPace(Clock()), list[int]()
    pace.seat(0, NEAR_AHEAD_BYTES)
    pace.seat(1)
    pace.has_sent(0, NEAR_AHEAD_BYTES)
    assert pace.may_send(0, lambda: None)
    pace.has_sent(0, 1)
    assert not pace.may_send(0, lambda: woken.append(0))
    pace.has_sent(1, 1)
    assert woken == [0]
    pace.has_sent(1, NEAR_AHEAD_BYTES + AHEAD_BYTES + 1)
    assert not pace.may_send(1, lambda: None)


def test_one_alone_is_never_held_up() -> None:
    pace = EvenPace()
    pace.seat(0)
    for _ in range(3):
        pace.has_sent(0, 10 * AHEAD_BYTES)
        assert pace.may_send(0, lambda: None)
