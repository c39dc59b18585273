"""Trainers on the server's host leave notes in mailboxes instead of messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from common.errors import PeerLost, PeerStalled, ProtocolError
from common.network.gradsync_pb2 import Chunk, Place, ServerMessage, TrainerMessage
from common.system.memory import SegmentPool
from ps.planes.mailboxes import Mailboxes
from ps.planes.shared_memory import OthersMemory, memory_of, place_of
from tests.support.groups import assert_same_bits
from tests.support.trainer_messages import (
    BUCKETS,
    DEADLINE_S,
    LAYOUT,
    RATE,
    Setting,
    commit_message,
    enter,
    gradients_of,
    open_group,
    parameters_message,
    parameters_of,
    register_message,
)


@dataclass
class Neighbours:
    """A group all of whose trainers are of this process, with the trainers' ends of its mailboxes."""

    setting: Setting
    mailboxes: Mailboxes
    memory: OthersMemory  # of rank 0
    pool: SegmentPool
    parameters: Place  # the server's

    def note(self, rank: int, message: TrainerMessage, *, ring: bool = True) -> None:
        mailbox = self.mailboxes.to_server[rank]
        if not ring:
            mailbox._bell = None
        assert mailbox.put(message.SerializeToString())

    def heard(self, rank: int) -> ServerMessage:
        note = self.mailboxes.to_trainer[rank].wait(DEADLINE_S)
        assert note is not None
        return ServerMessage.FromString(note)


@contextmanager
def neighbours(nranks: int, *, timeout: float = 30.0) -> Iterator[Neighbours]:
    with closing(SegmentPool()) as pool, ExitStack() as stack:
        setting = open_group(nranks, timeout=timeout, pool=pool)
        memories = [stack.enter_context(OthersMemory()) for _ in range(nranks)]
        links = [memory.visit(setting.group.desk) for memory in memories]
        for rank in range(nranks):
            message = register_message(rank)
            probe = pool.create(64)
            links[rank].give(probe)
            message.register.probe.CopyFrom(memory_of(probe))
            enter(setting.group, message, setting.inboxes[rank])
        setting.say(0, parameters_message(0, parameters_of(0)))
        planes = [inbox.of_kind("plane")[0].plane for inbox in setting.inboxes]
        assert [inbox.version for inbox in setting.inboxes] == [0] * nranks
        gradients = [pool.empty(LAYOUT.length) for _ in range(nranks)]
        for rank, array in enumerate(gradients):
            array[...] = gradients_of(rank, 0)
            setting.say(rank, TrainerMessage(gradients_at=place_of(array, pool, links[rank].give)))
        try:
            mailboxes = Mailboxes(memories[0].segment(planes[0].mailboxes), nranks)
            yield Neighbours(setting, mailboxes, memories[0], pool, planes[0].parameters)
        finally:
            setting.group.fail(PeerLost("the test is over"))
            setting.group.close()


def notice_message(bucket: int, *, step: int = 0) -> TrainerMessage:
    where = BUCKETS[bucket]
    return TrainerMessage(gradients=Chunk(step=step, bucket=bucket, start=where.start, size=where.stop - where.start))


def test_a_step_of_notes_alone_is_answered_by_notes() -> None:
    with neighbours(3) as group:
        for rank in (2, 0, 1):
            for bucket in range(len(BUCKETS)):
                group.note(rank, notice_message(bucket))
            group.note(rank, commit_message(0))
        assert [group.heard(rank).served.step for rank in range(3)] == [1, 1, 1]
        assert [inbox.version for inbox in group.setting.inboxes] == [0, 0, 0]  # not over gRPC
        assert group.setting.group.steps == 1


def test_what_is_committed_ahead_needs_no_memory_for_the_average_until_a_step_ends_with_it() -> None:
    """Of the last step the average is read where the server says that it is."""
    with neighbours(2) as group:
        made = len(group.pool.segments)
        for step, (ahead, update) in enumerate([(True, True), (True, True), (False, False)]):
            for rank in range(2):
                note = commit_message(step, ahead=ahead, update=update)
                pushes = [notice_message(bucket, step=step) for bucket in range(len(BUCKETS))]
                for message in [note, *pushes] if ahead else [*pushes, note]:
                    group.note(rank, message)
            served = [group.heard(rank).served for rank in range(2)]
            assert [each.step for each in served] == [step + 1] * 2
            assert len(group.pool.segments) == made + (not update)
            assert [each.HasField("gradients") for each in served] == [not update] * 2
        mean = (gradients_of(0, 0) + gradients_of(1, 0)) / np.float32(2)
        parameters = group.memory.array(group.parameters, LAYOUT.length)
        assert_same_bits(parameters, parameters_of(0) - np.float32(RATE) * mean - np.float32(RATE) * mean)
        assert_same_bits(group.memory.array(served[0].gradients, LAYOUT.length), mean)


def test_a_message_does_not_overtake_the_notes_before_it() -> None:
    """Though nobody has looked at them: the bell was not rung."""
    with neighbours(2) as group:
        for rank in range(2):
            for bucket in range(len(BUCKETS)):
                group.note(rank, notice_message(bucket), ring=False)
            group.setting.say(rank, commit_message(0))
        assert [group.heard(rank).served.step for rank in range(2)] == [1, 1]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (notice_message(1, step=7), "rank 1 sent step 7, this is step 0"),
        (commit_message(0), "rank 1 committed step 0 after 0 of 80 words"),
        (TrainerMessage(), "rank 1 sent an unexpected None message at step 0"),
    ],
)
def test_a_wrong_note_fails_all_by_name(message: TrainerMessage, text: str) -> None:
    with neighbours(2) as group:
        group.note(1, message)
        group.setting.failed(ProtocolError, text)


def test_who_leaves_no_note_is_named() -> None:
    with neighbours(2, timeout=0.3) as group:
        for bucket in range(len(BUCKETS)):
            group.note(1, notice_message(bucket))
        group.note(1, commit_message(0))
        group.setting.failed(PeerStalled, "rank 0 did not take part in step 0 for 0.3 s")


def test_who_is_lost_is_named_to_those_that_wait_for_a_note() -> None:
    with neighbours(2) as group:
        for bucket in range(len(BUCKETS)):
            group.note(1, notice_message(bucket))
        group.note(1, commit_message(0))
        group.setting.group.lost(0)
        group.setting.failed(PeerLost, "rank 0 died at step 0: its connection closed without a goodbye")
