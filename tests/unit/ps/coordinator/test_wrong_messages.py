"""Messages that cannot be right fail all by name; gathers are answered in rank order."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import GradSyncError, ProtocolError, StaleEpoch
from common.network.gradsync_pb2 import Chunk, TrainerMessage
from tests.support.trainer_messages import (
    LAYOUT,
    Inbox,
    commit_message,
    enter,
    expected_after,
    gather_message,
    gradient_message,
    open_group,
    parameters_message,
    parameters_of,
    register_message,
    running,
)

# ---- messages that cannot be right ------------------------------------------------------------------------------


def test_registering_twice_is_refused() -> None:
    setting = open_group(2)
    enter(setting.group, register_message(0), setting.inboxes[0])
    with pytest.raises(ProtocolError, match="rank 0 came twice"):
        enter(setting.group, register_message(0), setting.inboxes[1])


def test_a_rank_outside_the_group_is_refused() -> None:
    setting = open_group(2)
    with pytest.raises(ProtocolError, match=r"rank 2 .*outside 0\.\.1"):
        enter(setting.group, register_message(2), setting.inboxes[0])


def test_a_register_of_another_epoch_is_refused() -> None:
    setting = open_group(2, epoch=5)
    with pytest.raises(StaleEpoch, match="rank 1 sent a message of epoch 4, this is epoch 5"):
        enter(setting.group, register_message(1, epoch=4), setting.inboxes[1])


@pytest.mark.parametrize("message", [commit_message(0), parameters_message(0, parameters_of(0)), TrainerMessage()])
def test_the_first_message_must_be_a_register(message: TrainerMessage) -> None:
    with pytest.raises(ProtocolError, match="did not say hello"):
        open_group(1).group.enter(message, Inbox())


@pytest.mark.parametrize(
    "message",
    [commit_message(0), gradient_message(1, 0, 0, 64, 80), parameters_message(0, parameters_of(0))],
    ids=["commit", "gradients", "parameters"],
)
def test_data_before_anyone_registered_is_refused(message: TrainerMessage) -> None:
    setting = open_group(2)
    with pytest.raises(ProtocolError, match="rank 1 sent data before registering"):
        setting.group.handle(1, message)


WRONG_MESSAGES: dict[str, tuple[int, TrainerMessage, type[GradSyncError], str]] = {
    "parameters of rank 1": (1, parameters_message(80, np.ones(1, np.float32)), ProtocolError, "rank 1 sent param"),
    "parameters again": (0, parameters_message(0, parameters_of(0)), ProtocolError, "expected 80 from rank 0"),
    "parameters of another epoch": (0, parameters_message(0, parameters_of(0), epoch=9), StaleEpoch, "epoch 9"),
    "ragged gradients": (1, TrainerMessage(gradients=Chunk(start=64, data=b"abc")), ProtocolError, "3 bytes"),
    "gradients of another step": (1, gradient_message(1, 4, 0, 64, 80), ProtocolError, "rank 1 sent step 4"),
    "gradients of another bucket": (1, gradient_message(1, 0, 1, 64, 80), ProtocolError, "of bucket 1"),
    "commit without gradients": (1, commit_message(0), ProtocolError, "rank 1 committed step 0 after 0 of 80"),
    "commit of another epoch": (1, commit_message(0, epoch=1), StaleEpoch, "rank 1 sent a message of epoch 1"),
    "gather of another epoch": (1, gather_message(0, epoch=1), StaleEpoch, "rank 1 sent a message of epoch 1"),
    "register again": (1, register_message(1), ProtocolError, "rank 1 sent an unexpected register"),
    "nothing": (1, TrainerMessage(), ProtocolError, "rank 1 sent an unexpected None"),
}


@pytest.mark.parametrize("name", WRONG_MESSAGES)
def test_a_wrong_message_fails_all_by_name(name: str) -> None:
    rank, message, kind, text = WRONG_MESSAGES[name]
    setting = running(2)
    setting.say(rank, message)
    setting.failed(kind, text)
    assert [inbox.version for inbox in setting.inboxes] == [0, 0]


@pytest.mark.parametrize(
    ("start", "size"), [(1, 79), (0, 81)], ids=["a gap at the beginning", "more than the shard holds"]
)
def test_parameters_must_fit(start: int, size: int) -> None:
    setting = open_group(1)
    enter(setting.group, register_message(0), setting.inboxes[0])
    setting.say(0, parameters_message(start, np.ones(size, np.float32)))
    setting.failed(ProtocolError, f"rank 0 sent parameters from word {start}, expected 0")


# ---- gather -----------------------------------------------------------------------------------------------------


def test_gathers_are_answered_in_rank_order_whoever_calls_first() -> None:
    setting = running(3)
    for sequence, order in enumerate([(2, 0, 1), (0, 1, 2), (1, 2, 0)]):
        for rank in order:
            setting.say(rank, gather_message(sequence, bytes([10 * sequence + rank])))
    expected = [bytes([10 * sequence + rank for rank in range(3)]) for sequence in range(3)]
    for inbox in setting.inboxes:
        assert [m.gathered.data for m in inbox.of_kind("gathered")] == expected
        assert [m.gathered.sequence for m in inbox.of_kind("gathered")] == [0, 1, 2]


def test_a_gather_is_not_answered_before_all_have_called() -> None:
    setting = running(3)
    setting.say(2, gather_message(0))
    setting.say(0, gather_message(0))
    assert not any(inbox.of_kind("gathered") for inbox in setting.inboxes)


def test_a_gather_between_steps_leaves_the_steps_alone() -> None:
    setting = running(2)
    for step in range(2):
        for rank in (0, 1):
            setting.step(rank, step)
        for rank in (1, 0):
            setting.say(rank, gather_message(step))
    seen = np.zeros(LAYOUT.length, np.float32)
    setting.inboxes[1].parameters(2, seen)
    assert seen.tobytes() == expected_after(2, 2).tobytes()


@pytest.mark.parametrize(("rank", "sequence"), [(0, 0), (0, 1), (1, 1)], ids=["twice", "next too early", "other"])
def test_a_gather_out_of_turn_fails_all(rank: int, sequence: int) -> None:
    setting = running(2)
    setting.say(0, gather_message(0))
    setting.say(rank, gather_message(sequence))
    setting.failed(ProtocolError, f"rank {rank} called gather number {sequence} out of turn")
