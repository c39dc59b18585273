"""Trainers that leave, are lost or come late: who is told what."""

from __future__ import annotations

import threading

import pytest

from common.errors import PeerLost, PeerStalled, ProtocolError
from common.network.gradsync_pb2 import Chunk, Gather, Goodbye, Hello, TrainerMessage
from ps.coordinator.coordinator import Coordinator
from tests.support.trainer_messages import (
    DEADLINE_S,
    Inbox,
    commit_message,
    enter,
    gather_message,
    goodbye_message,
    open_group,
    outcome_of,
    register_message,
    running,
)

# ---- leaving ----------------------------------------------------------------------------------------------------


def test_wait_returns_once_all_have_said_goodbye() -> None:
    setting = running(3)
    waiter = threading.Thread(target=setting.group.wait)
    waiter.start()
    for rank in (2, 0, 1):
        assert waiter.is_alive()
        setting.say(rank, goodbye_message())
        setting.group.lost(rank)  # its stream ends after that
    waiter.join(DEADLINE_S)
    assert not waiter.is_alive()
    assert all(inbox.ended and not inbox.of_kind("failure") for inbox in setting.inboxes)


def test_wait_raises_what_happens_while_it_waits() -> None:
    setting = running(2)
    timer = threading.Timer(0.05, setting.group.lost, [1])
    timer.start()
    assert isinstance(outcome_of(setting.group), PeerLost)
    timer.join()


def test_goodbye_with_a_reason_is_told_to_all() -> None:
    setting = running(3)
    for rank in range(3):
        setting.step(rank, 0)
    setting.say(1, goodbye_message("DataError: no file"))
    setting.failed(PeerLost, "rank 1 left at step 1 with DataError: no file")


@pytest.mark.parametrize("first", ["goodbye", "commit"])
def test_finishing_early_fails_those_who_go_on(first: str) -> None:
    setting = running(2)
    if first == "goodbye":
        setting.say(1, goodbye_message())
        assert not setting.inboxes[0].of_kind("failure")
        setting.step(0, 0)
    else:
        setting.step(0, 0)
        setting.say(1, goodbye_message())
    error = outcome_of(setting.group)
    assert isinstance(error, PeerLost)
    assert "rank 1 finished at step 0 while others go on; all ranks must make the same number of steps" in str(error)
    assert isinstance(setting.inboxes[0].failure, PeerLost)


@pytest.mark.parametrize("first", ["goodbye", "gather"])
def test_leaving_before_a_gather_fails_those_who_gather(first: str) -> None:
    setting = running(3)
    messages = [(2, goodbye_message()), (0, gather_message(0))]
    for rank, message in messages if first == "goodbye" else reversed(messages):
        setting.say(rank, message)
    error = outcome_of(setting.group)
    assert isinstance(error, PeerLost)
    assert "rank 2 finished at step 0 while others go on" in str(error)
    assert isinstance(setting.inboxes[0].failure, PeerLost)
    assert isinstance(setting.inboxes[1].failure, PeerLost)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_lost_trainer_is_named_with_its_step(steps: int) -> None:
    setting = running(3)
    for step in range(steps):
        for rank in range(3):
            setting.step(rank, step)
    setting.group.lost(2)
    setting.failed(PeerLost, f"rank 2 died at step {steps}: its connection closed without a goodbye")


def test_a_trainer_lost_before_all_have_registered_is_named() -> None:
    setting = open_group(2)
    enter(setting.group, register_message(1), setting.inboxes[1])
    setting.group.lost(1)
    error = outcome_of(setting.group)
    assert isinstance(error, PeerLost)
    assert "rank 1 died at step 0" in str(error)


def test_who_registers_after_the_failure_is_told_too() -> None:
    setting = open_group(2)
    setting.group.fail(PeerLost("rank 0 died at step 0"))
    enter(setting.group, register_message(1), setting.inboxes[1])
    assert str(setting.inboxes[1].failure) == "rank 0 died at step 0"


def test_only_the_first_failure_counts() -> None:
    setting = running(2)
    setting.group.lost(1)
    setting.group.fail(ProtocolError("later"))
    setting.group.lost(0)
    setting.failed(PeerLost, "rank 1 died")


def test_messages_after_a_failure_change_nothing() -> None:
    setting = running(2)
    setting.step(0, 0)
    setting.group.fail(PeerLost("rank 7 died"))
    heard = [list(inbox.received) for inbox in setting.inboxes]
    setting.step(1, 0)
    setting.say(1, commit_message(99))
    setting.say(0, goodbye_message("another reason"))
    assert setting.group.steps == 0
    assert [inbox.received for inbox in setting.inboxes] == heard
    setting.failed(PeerLost, "rank 7 died")


# ---- what happens before training -------------------------------------------------------------------------------


def test_a_goodbye_before_the_others_register_fails_them() -> None:
    setting = open_group(2)
    for rank in range(2):
        hello = TrainerMessage(hello=Hello(epoch=0, rank=rank))
        setting.group.enter(hello, setting.inboxes[rank])
    setting.say(1, TrainerMessage(goodbye=Goodbye(epoch=0)))
    setting.say(0, register_message(0))
    error = outcome_of(setting.group)
    assert isinstance(error, PeerLost)
    assert "rank 1 finished at step 0 while others go on" in str(error)


def test_who_comes_and_leaves_before_the_others_have_come_is_not_missed() -> None:
    setting = open_group(2)
    setting.group.expect(DEADLINE_S)  # from now on they wait for who has not come
    for rank in (1, 0):
        setting.group.enter(TrainerMessage(hello=Hello(epoch=0, rank=rank)), setting.inboxes[rank])
        setting.say(rank, TrainerMessage(goodbye=Goodbye(epoch=0)))
        setting.group.lost(rank)
    setting.group.wait()
    assert setting.group.failure is None


def test_who_joined_but_never_came_is_named() -> None:
    group = Coordinator(2, timeout=0.3)
    group.enter(TrainerMessage(hello=Hello(epoch=0, rank=0)), Inbox())
    group.expect(0.3)
    error = outcome_of(group)
    assert isinstance(error, PeerStalled)
    assert "rank 1 did not take part in step 0 for 0.3 s" in str(error)


def test_who_takes_long_between_coming_and_registering_is_not_blamed() -> None:
    group = Coordinator(2, timeout=0.2)
    group.expect(0.2)
    for rank in range(2):
        group.enter(TrainerMessage(hello=Hello(epoch=0, rank=rank)), Inbox())
    waiter = threading.Thread(target=group.silence.watch, daemon=True)
    waiter.start()
    waiter.join(0.6)
    assert waiter.is_alive()
    assert group.failure is None
    group.fail(PeerLost("end of test"))


def test_parameters_after_the_start_are_refused_even_if_empty() -> None:
    setting = running(2)
    setting.say(0, TrainerMessage(parameters=Chunk(start=80)))
    setting.failed(ProtocolError, "rank 0 sent parameters from word 80")


def test_a_gather_of_more_than_it_announced_is_refused() -> None:
    setting = running(2)
    setting.say(1, TrainerMessage(gather=Gather(sequence=0, size=1, data=b"ab")))
    setting.failed(ProtocolError, "rank 1 sent 2 bytes of a gather of 1")
