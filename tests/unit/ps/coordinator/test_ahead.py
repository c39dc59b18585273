"""Steps that are committed ahead of the gradients."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import PeerLost, PeerStalled, ProtocolError
from tests.support.trainer_messages import (
    BUCKETS,
    LAYOUT,
    Clock,
    Setting,
    commit_message,
    expected_after,
    goodbye_message,
    gradient_message,
    outcome_of,
    running,
    stalled,
)


def committed_ahead(nranks: int, **options: object) -> Setting:
    setting = running(nranks, **options)
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


def test_who_committed_ahead_and_fell_silent_is_named() -> None:
    setting = committed_ahead(3, timeout=0.3)
    push_bucket(setting, 2, 0)
    for rank in (0, 1):
        setting.push_all(rank, 0)
    stalled(setting, "2 did not take part in step 0", timeout=0.3)


def test_to_commit_ahead_is_not_to_wait() -> None:
    """A long backward follows it; only who has pushed everything waits."""
    clock = Clock()
    setting = committed_ahead(2, timeout=10.0, clock=clock)
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
