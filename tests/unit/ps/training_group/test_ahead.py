"""Steps that are committed ahead of the gradients."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import PeerLost, PeerStalled, ProtocolError
from ps.coordinator.training_group import ServerOutbox, TrainingGroup
from ps.planes.wire import data_of
from tests.support.trainer_messages import (
    BUCKETS,
    LAYOUT,
    Clock,
    Inbox,
    Setting,
    commit_message,
    drawn,
    enter,
    expected_after,
    goodbye_message,
    gradient_message,
    outcome_of,
    parameters_message,
    parameters_of,
    register_message,
    running,
    stalled,
)


def committed_ahead(nranks: int, *, timeout: float = 30.0) -> Setting:
    setting = running(nranks, timeout=timeout)
    for rank in range(nranks):
        setting.say(rank, commit_message(0, ahead=True))
    return setting


def push_bucket(setting: Setting, rank: int, bucket: int, *, step: int = 0) -> None:
    setting.say(rank, gradient_message(rank, step, bucket, BUCKETS[bucket].start, BUCKETS[bucket].stop))


def test_what_has_come_from_all_is_served_while_the_rest_is_on_its_way() -> None:
    setting = committed_ahead(2)
    push_bucket(setting, 0, 0)
    assert not [m for m in setting.inboxes[0].of_kind("parameters") if m.parameters.step == 1]
    push_bucket(setting, 1, 0)
    after = expected_after(1, 2)
    for inbox in setting.inboxes:
        mine = np.zeros(LAYOUT.length, np.float32)
        inbox.parameters(1, mine)
        np.testing.assert_array_equal(mine, np.concatenate([np.zeros(64, np.float32), after[64:]]))
        assert inbox.version == 0
    push_bucket(setting, 0, 1)
    push_bucket(setting, 1, 1)
    for inbox in setting.inboxes:
        mine = np.zeros(LAYOUT.length, np.float32)
        inbox.parameters(1, mine)
        assert mine.tobytes() == after.tobytes()
        assert inbox.version == 1


@pytest.mark.parametrize(("priority", "order"), [(False, [64, 0]), (True, [0, 64])])
def test_parameters_that_wait_are_sent_front_first_to_those_who_ask_for_it(priority: bool, order: list[int]) -> None:
    """Buckets become ready from the back to the front; the other trainer, who takes them at once, has them so."""
    setting = Setting(TrainingGroup(2), [Inbox(), ServerOutbox()])  # type: ignore[list-item]
    for rank in range(2):
        message = register_message(rank)
        message.register.priority = priority and rank == 1
        enter(setting.group, message, setting.inboxes[rank])
    setting.say(0, parameters_message(0, parameters_of(0)))
    for rank in range(2):
        setting.say(rank, commit_message(0, ahead=True))
    for bucket in range(len(BUCKETS)):
        for rank in range(2):
            push_bucket(setting, rank, bucket)
    assert [m.parameters.start for m in setting.inboxes[0].of_kind("parameters")] == [0, 64, 0]
    for rank in range(2):
        setting.say(rank, goodbye_message())
    messages = drawn(setting.inboxes[1])
    kinds = [m.WhichOneof("kind") for m in messages]
    assert kinds == ["plane", "parameters", "served", *["parameters"] * 2, "served"]
    assert [m.parameters.start for m in messages[3:5]] == order
    after = np.concatenate([data_of(m.parameters) for m in sorted(messages[3:5], key=lambda m: m.parameters.start)])
    assert after.tobytes() == expected_after(1, 2).tobytes()


def test_who_committed_ahead_and_fell_silent_is_named() -> None:
    setting = committed_ahead(3, timeout=0.3)
    push_bucket(setting, 2, 0)
    for rank in (0, 1):
        setting.push_all(rank, 0)
    stalled(setting, "2 did not take part in step 0", timeout=0.3)


def test_to_commit_ahead_is_not_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long backward follows it; only who has pushed everything waits."""
    clock = Clock()
    monkeypatch.setattr("ps.coordinator.training_group.time", clock)
    setting = committed_ahead(2, timeout=10.0)
    push_bucket(setting, 0, 0)
    clock.advance(25.0)
    push_bucket(setting, 0, 1)
    clock.advance(9.0)
    assert not setting.inboxes[0].of_kind("failure")
    clock.advance(2.0)
    setting.failed(PeerStalled, "rank 1 did not take part in step 0 for 10 s")


def test_who_dies_after_committing_ahead_is_named() -> None:
    setting = committed_ahead(3)
    push_bucket(setting, 1, 0)
    setting.group.lost(1)
    setting.failed(PeerLost, "rank 1 died at step 0: its connection closed without a goodbye")


@pytest.mark.parametrize("leaves_first", [True, False])
def test_who_leaves_while_others_commit_ahead_is_named(leaves_first: bool) -> None:
    setting = running(2)
    actions = [lambda: setting.say(1, goodbye_message()), lambda: setting.say(0, commit_message(0, ahead=True))]
    for action in actions if leaves_first else reversed(actions):
        action()
    setting.push_all(0, 0)
    assert "rank 1 finished at step 0 while others go on" in str(outcome_of(setting.group))
    assert isinstance(setting.inboxes[0].failure, PeerLost)


def test_a_server_stops_when_a_step_that_was_committed_ahead_is_complete() -> None:
    setting = committed_ahead(2)
    for rank in (0, 1):
        push_bucket(setting, rank, 0)
    setting.group.stop_after_step(PeerLost("server 0 was stopped"))
    assert not setting.inboxes[0].of_kind("failure")
    for rank in (0, 1):
        push_bucket(setting, rank, 1)
    assert [inbox.version for inbox in setting.inboxes] == [1, 1]
    setting.failed(PeerLost, "server 0 was stopped")


def test_a_server_that_is_to_stop_does_not_wait_for_ever_for_a_step_committed_ahead() -> None:
    setting = committed_ahead(2, timeout=0.2)
    setting.group.stop_after_step(PeerLost("server 0 was stopped"))
    setting.failed(PeerStalled, r"^rank 0, 1 did not take part in step 0 for 0\.2 s")


def test_only_updates_are_committed_ahead() -> None:
    setting = running(2)
    setting.say(1, commit_message(0, update=False, ahead=True))
    setting.failed(ProtocolError, "rank 1 committed step 0 ahead, which is for updates by new gradients only")


def test_steps_that_were_committed_ahead_are_counted_once() -> None:
    setting = committed_ahead(2)
    setting.push_all(1, 0)
    setting.push_all(0, 0)
    trainers = setting.group.status().trainers
    assert [(t.steps, t.times_last) for t in trainers] == [(1, 1), (1, 0)]
