"""Who falls silent is named; who keeps sending is not."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import pytest

from common.errors import PeerLost, PeerStalled
from common.network.gradsync_pb2 import Alive, Awaiting, Hello, TrainerMessage
from common.network.rendezvous import GRACE
from ps.planes.protobuf_messages import state_pieces
from tests.support.trainer_messages import (
    DEADLINE_S,
    LAYOUT,
    Clock,
    Setting,
    commit_message,
    configured,
    enter,
    gather_message,
    goodbye_message,
    gradient_message,
    loaded,
    open_group,
    parameters_message,
    parameters_of,
    register_message,
    running,
    stalled,
    state_message,
    update,
)


def test_who_does_not_commit_is_named() -> None:
    setting = running(3, timeout=0.3)
    setting.push_all(0, 0)
    setting.push_all(2, 0)
    setting.step(1, 0)
    stalled(setting, "0, 2 did not take part in step 0", timeout=0.3)


def test_a_later_step_is_named() -> None:
    setting = running(2, timeout=0.3)
    for rank in (0, 1):
        setting.step(rank, 0)
    setting.step(0, 1)
    stalled(setting, "1 did not take part in step 1", timeout=0.3)


def test_who_does_not_register_is_named() -> None:
    setting = open_group(3, timeout=0.3)
    enter(setting.group, register_message(1), setting.inboxes[1])
    setting.inboxes = [setting.inboxes[1]]
    stalled(setting, "0, 2 did not take part in step 0", timeout=0.3)


def test_who_comes_when_others_have_registered_and_does_not_is_named() -> None:
    setting = open_group(2, timeout=0.3)
    enter(setting.group, register_message(1), setting.inboxes[1])
    setting.group.enter(TrainerMessage(hello=Hello(rank=0)), setting.inboxes[0])
    stalled(setting, "0 did not take part in step 0", timeout=0.3)


def test_rank_0_that_sends_no_parameters_is_named() -> None:
    setting = open_group(2, timeout=0.3)
    for rank in (0, 1):
        enter(setting.group, register_message(rank), setting.inboxes[rank])
    setting.say(0, parameters_message(0, parameters_of(0)[:79]))
    stalled(setting, "0 did not take part in step 0", timeout=0.3)


def test_who_does_not_gather_is_named() -> None:
    setting = running(3, timeout=0.3)
    setting.say(0, gather_message(0))
    setting.say(2, gather_message(0))
    stalled(setting, "1 did not take part in step 0", timeout=0.3)


def test_who_comes_when_others_already_gather_and_does_not_is_named() -> None:
    setting = one_gathers_before_the_other_comes()
    stalled(setting, "0 did not take part in step 0", timeout=0.3)


def test_who_comes_when_others_already_gather_and_leaves_is_missed() -> None:
    setting = one_gathers_before_the_other_comes()
    setting.say(0, goodbye_message())
    setting.failed(PeerLost, "^rank 0 finished at step 0 while others go on")


def one_gathers_before_the_other_comes() -> Setting:
    setting = open_group(2, timeout=0.3)
    setting.group.enter(TrainerMessage(hello=Hello(rank=1)), setting.inboxes[1])
    setting.say(1, gather_message(0, b"x"))
    setting.group.enter(TrainerMessage(hello=Hello(rank=0)), setting.inboxes[0])
    return setting


def test_nobody_stalls_while_nobody_waits() -> None:
    setting = running(2, timeout=0.2)
    setting.push_all(0, 0)
    waiter = threading.Thread(target=setting.group.wait)
    waiter.start()
    waiter.join(0.6)  # a long forward pass of both: three times the limit
    assert waiter.is_alive()
    setting.push_all(1, 0)
    for message in (commit_message(0), goodbye_message()):
        for rank in (0, 1):
            setting.say(rank, message)
    waiter.join(DEADLINE_S)
    assert not waiter.is_alive()


def test_a_slow_trainer_that_keeps_sending_is_not_stalled() -> None:
    clock = Clock()
    setting = running(2, timeout=10.0, clock=clock)
    setting.step(0, 0)
    for start in range(0, 64, 16):
        clock.advance(9.0)
        setting.say(1, gradient_message(1, 0, 1, start, start + 16))
    assert not setting.inboxes[0].of_kind("failure")
    clock.advance(11.0)
    setting.failed(PeerStalled, "^rank 1 did not take part in step 0 for 10 s")


def test_who_waits_hears_that_others_still_send() -> None:
    """Else it would take the server for frozen, for its own limit counts from its own commit."""
    clock = Clock()
    setting = running(2, timeout=10.0, clock=clock)
    setting.step(0, 0)
    signs = []
    for start in range(0, 64, 16):
        clock.advance(GRACE * 0.4)
        setting.say(1, gradient_message(1, 0, 1, start, start + 16))
        signs.append((setting.inboxes[0].signs, setting.inboxes[1].signs))
    assert signs == [(0, 0), (1, 1), (1, 1), (2, 2)]  # at most one in GRACE / 2, so that the server complains first


@pytest.mark.long
def test_a_trainer_that_keeps_sending_parameters_or_state_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("ps.planes.protobuf_messages.CHUNK_BYTES", 60)
    setting = configured(2, timeout=10.0, clock=clock)
    update(setting, 0, ranks=[1], replaced=True)
    for start in range(0, 80, 16):
        clock.advance(9.0)
        setting.say(0, parameters_message(start, np.ones(16, np.float32)))
    for piece in state_pieces(loaded(np.ones(LAYOUT.length, np.float32)), epoch=0):
        clock.advance(9.0)
        setting.say(0, state_message(piece))
    assert not setting.inboxes[0].of_kind("failure")
    clock.advance(11.0)
    setting.failed(PeerStalled, "^rank 0 did not take part in step 0 for 10 s")


def answered(setting: Setting, clock: Clock, times: int, ranks: Iterable[int]) -> None:
    """Time passes; these ranks give a sign of life every 5 seconds."""
    for _ in range(times):
        clock.advance(5.0)
        for rank in ranks:
            setting.say(rank, TrainerMessage(alive=Alive()))


@pytest.mark.parametrize("mode", ["", pytest.param("ssp:0", marks=pytest.mark.long)])
def test_a_trainer_that_lives_is_waited_for_and_rank_0_says_so(mode: str) -> None:
    clock = Clock()
    setting = running(3, timeout=10.0, wait_limit=50.0, clock=clock, mode=mode)
    for rank in (1, 2):
        setting.step(rank, 0)
    answered(setting, clock, 9, [0])
    assert not setting.inboxes[0].of_kind("failure")
    said = [[line for line in inbox.asked if line] for inbox in setting.inboxes]
    assert said[1:] == [[], []]
    assert said[0] == [f"rank 1, 2 wait for rank 0, at step 0, for {s} s; it is alive" for s in (15, 25, 45)]
    assert all(inbox.asked.count("") >= 9 for inbox in setting.inboxes)  # who waits also hears that the server lives
    answered(setting, clock, 2, [0])
    setting.failed(PeerStalled, "^rank 0 did not take part in step 0 for 50 s; it is alive, but slower than --wait-lim")


@pytest.mark.parametrize("other", ["gathers", "awaits a message"])
def test_all_that_wait_for_one_another_are_told_so(other: str) -> None:
    """One within a step, the other for an answer that only the first can give."""
    clock = Clock()
    setting = running(2, timeout=10.0, clock=clock)
    setting.step(0, 0)
    setting.say(1, gather_message(0) if other == "gathers" else TrainerMessage(awaiting=Awaiting(rank=0)))
    answered(setting, clock, 3, [0, 1])
    setting.failed(PeerStalled, r"^rank . did not take part (in step 0 )?for 10 s; every rank waits for another one: ")


def test_a_trainer_that_gives_no_more_signs_of_life_is_stalled() -> None:
    clock = Clock()
    setting = running(2, timeout=10.0, clock=clock)
    setting.step(0, 0)
    answered(setting, clock, 6, [0, 1])
    answered(setting, clock, 1, [0])
    assert not setting.inboxes[0].of_kind("failure")
    answered(setting, clock, 2, [0])
    setting.failed(PeerStalled, r"^rank 1 did not take part in step 0 for 10 s; it gives no sign of life \(--timeout\)")
