"""A server's trainers in any order of messages, with plain queues and no gRPC: whole lives, and disagreement."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import LayoutMismatch, PeerLost, UsageError
from common.network.gradsync_pb2 import TrainerMessage
from common.tensors.arena import FloatArray
from common.tensors.buckets import Bucket
from common.tensors.optimizers import SGD, Adam
from ps.coordinator.coordinator import Coordinator
from ps.coordinator.liveness import ServerQueue
from ps.planes.protobuf_messages import data_of
from ps.store.shards import plan_shards, shard_of_bucket
from tests.support.thorough import examples
from tests.support.trainer_messages import (
    BUCKETS,
    LAYOUT,
    RATE,
    SHAPES,
    Inbox,
    Setting,
    commit_message,
    drawn,
    enter,
    expected_after,
    gather_message,
    goodbye_message,
    gradient_message,
    gradients_of,
    open_group,
    outcome_of,
    parameters_message,
    parameters_of,
    register_message,
    running,
)

# ---- whole lives ------------------------------------------------------------------------------------------------

Action = tuple[int, Callable[[], object]]  # (the version of parameters to wait for, what to do then)


class Life:
    """One trainer's messages in its own order; the next one may wait for parameters or an all-gather."""

    def __init__(self, rank: int, setting: Setting, shard: tuple[int, int], steps: int, random: Random) -> None:
        self.rank, self.setting, self.inbox = rank, setting, setting.inboxes[rank]
        self.slice = plan_shards(LAYOUT.length, shard[1])[shard[0]]
        self.seen: list[FloatArray] = []
        self.actions = list(self.script(steps, random))

    def script(self, steps: int, random: Random) -> Iterator[Action]:
        yield -1, lambda: enter(self.setting.group, register_message(self.rank), self.inbox)
        if self.rank == 0:
            for a, b in cut(self.slice.start, self.slice.stop, random):
                yield -1, lambda a=a, b=b: self.say(parameters_message(a, parameters_of(0)[a:b]))
        for step in range(steps):
            yield step, lambda: self.look()
            messages = list(self.pushes(step, random))
            at = random.randint(0, len(messages))
            messages.insert(at, commit_message(step, ahead=at < len(messages)))
            for message in messages:
                yield step, lambda message=message: self.say(message)
        yield steps, lambda: self.look()
        yield steps, lambda: self.say(gather_message(0, bytes([self.rank, 7 * self.rank])))
        yield steps, lambda: self.say(goodbye_message())

    def pushes(self, step: int, random: Random) -> Iterator[TrainerMessage]:
        order = list(enumerate(BUCKETS))
        random.shuffle(order)
        for bucket, where in order:
            part = shard_of_bucket(self.slice, where)
            for a, b in cut(part.start, part.stop, random):
                yield gradient_message(self.rank, step, bucket, a, b)

    def say(self, message: TrainerMessage) -> None:
        self.setting.group.handle(self.rank, message)

    def look(self) -> None:
        mine = np.full(LAYOUT.length, np.nan, np.float32)
        self.inbox.parameters(self.inbox.version, mine)
        self.seen.append(mine[self.slice.start : self.slice.stop])

    def can_go_on(self) -> bool:
        if not self.actions or self.inbox.version < self.actions[0][0]:
            return False
        return len(self.actions) > 1 or bool(self.inbox.of_kind("gathered"))

    def go_on(self) -> None:
        self.actions.pop(0)[1]()


def cut(start: int, stop: int, random: Random) -> list[tuple[int, int]]:
    if start == stop:
        return []
    edges = sorted({start, stop, random.randint(start, stop)})
    return list(pairwise(edges))


@settings(max_examples=examples(30, 300), deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([(0, 1), (0, 2), (1, 2), (1, 3), (7, 8)]),
    st.randoms(use_true_random=False),
)
def test_whole_lives_in_any_order_of_messages(nranks: int, shard: tuple[int, int], random: Random) -> None:
    steps = 3
    setting = open_group(nranks, shard=shard)
    lives = [Life(rank, setting, shard, steps, random) for rank in range(nranks)]
    while able := [life for life in lives if life.can_go_on()]:
        random.choice(able).go_on()
    assert outcome_of(setting.group) is None
    assert setting.group.steps == steps
    everyone = b"".join(bytes([rank, 7 * rank]) for rank in range(nranks))
    for life in lives:
        for step, seen in enumerate(life.seen):
            expected = expected_after(step, nranks)[life.slice.start : life.slice.stop]
            assert seen.tobytes() == expected.tobytes()
        assert len(life.seen) == steps + 1
        assert [m.gathered.data for m in life.inbox.of_kind("gathered")] == [everyone]
        assert not life.inbox.of_kind("failure")
        assert life.inbox.ended


def test_a_send_queue_gives_messages_in_order_and_ends() -> None:
    group, queue = Coordinator(1), ServerQueue()
    enter(group, register_message(0), queue)
    group.handle(0, parameters_message(0, parameters_of(0)))
    group.handle(0, gather_message(0, b"abc"))
    group.handle(0, goodbye_message())
    group.lost(0)
    assert outcome_of(group) is None
    plane, first, *rest = drawn(queue)
    assert plane.plane.why_not == "the trainer does not offer its memory"
    np.testing.assert_array_equal(data_of(first.parameters), parameters_of(0))
    assert [m.WhichOneof("kind") for m in rest] == ["served", "gathered"]
    assert rest[1].gathered.data == b"abc"


def test_a_model_without_parameters_has_steps_too() -> None:
    setting = open_group(2)
    for rank in (1, 0):
        enter(setting.group, register_message(rank, shapes=[], buckets=()), setting.inboxes[rank])
    for rank in (0, 1):
        setting.say(rank, commit_message(0))
    assert [inbox.version for inbox in setting.inboxes] == [1, 1]


def test_parameters_are_not_touched_before_all_have_committed() -> None:
    setting = running(2)
    setting.push_all(1, 0)
    setting.step(0, 0)
    assert setting.group.steps == 0
    assert [inbox.version for inbox in setting.inboxes] == [0, 0]
    setting.say(1, commit_message(0))
    assert [inbox.version for inbox in setting.inboxes] == [1, 1]


def test_without_an_optimizer_averaged_gradients_are_served() -> None:
    setting = open_group(2)
    for rank in (0, 1):
        enter(setting.group, register_message(rank, optimizer=None), setting.inboxes[rank])
    setting.say(0, parameters_message(0, parameters_of(0)))
    for step in range(2):
        for rank in (1, 0):
            setting.step(rank, step, update=False)
    for inbox in setting.inboxes:
        served = [np.zeros(LAYOUT.length, np.float32) for _ in range(3)]
        for version in range(3):
            inbox.parameters(version, served[version])
        assert served[0].tobytes() == parameters_of(0).tobytes()
        for step in range(2):
            mean = (gradients_of(0, step) + gradients_of(1, step)) * np.float32(0.5)
            assert served[step + 1].tobytes() == mean.tobytes()


def test_averaged_gradients_stay_as_they_were_for_a_slow_reader() -> None:
    """Rank 0 goes on and pushes the next step before rank 1 has drawn what was served."""
    group, slow = Coordinator(2), ServerQueue()
    setting = Setting(group, [Inbox(), Inbox()])
    enter(group, register_message(0, optimizer=None), setting.inboxes[0])
    enter(group, register_message(1, optimizer=None), slow)
    setting.say(0, parameters_message(0, parameters_of(0)))
    for rank in (0, 1):
        setting.step(rank, 0, update=False)
    setting.push_all(0, 1)
    group.fail(PeerLost("end of test"))
    served = [m.parameters for m in drawn(slow) if m.WhichOneof("kind") == "parameters" and m.parameters.step == 1]
    mean = (gradients_of(0, 0) + gradients_of(1, 0)) * np.float32(0.5)
    np.testing.assert_array_equal(np.concatenate([data_of(chunk) for chunk in served]), mean)


# ---- disagreement -----------------------------------------------------------------------------------------------

OTHER_REGISTERS = {
    "name": (register_message(1, shapes=[("w", (5, 9)), ("c", (9,)), ("v", (3,))]), r"parameter b \[9\] against c"),
    "shape": (register_message(1, shapes=[("w", (9, 5)), *SHAPES[1:]]), r"w \[5, 9\] against w \[9, 5\]"),
    "order": (register_message(1, shapes=[*SHAPES[1:], SHAPES[0]]), r"parameter w \[5, 9\] against b \[9\]"),
    "count": (register_message(1, shapes=SHAPES[:2]), "3 parameters against 2"),
    "bucket plan": (register_message(1, buckets=(Bucket(0, 80),)), "bucket plan of 2 against one of 1"),
    "optimizer": (register_message(1, optimizer=Adam()), r"SGD\(.*against Adam\("),
    "learning rate": (register_message(1, optimizer=SGD(learning_rate=0.5)), r"0\.001.*against.*0\.5"),
    "no optimizer": (register_message(1, optimizer=None), r"SGD\(.*against None"),
    "setting": (register_message(1, optimizer=SGD(weight_decay=0.1)), r"weight_decay=0\.0.*weight_decay=0\.1"),
}


@pytest.mark.parametrize("what", OTHER_REGISTERS)
def test_trainers_that_disagree_are_told_the_difference(what: str) -> None:
    message, text = OTHER_REGISTERS[what]
    setting = open_group(2)
    enter(setting.group, register_message(0), setting.inboxes[0])
    with pytest.raises(LayoutMismatch, match=f"rank 0 and rank 1 disagree: .*{text}") as caught:
        enter(setting.group, message, setting.inboxes[1])
    setting.group.fail(caught.value)
    setting.failed(LayoutMismatch, text)


def test_who_comes_after_a_disagreement_is_told_too() -> None:
    setting = open_group(3)
    enter(setting.group, register_message(2, optimizer=Adam()), setting.inboxes[2])
    with pytest.raises(LayoutMismatch) as caught:
        enter(setting.group, register_message(0), setting.inboxes[0])
    setting.group.fail(caught.value)
    enter(setting.group, register_message(1), setting.inboxes[1])
    setting.failed(LayoutMismatch, "rank 2 and rank 0 disagree")


def test_another_learning_rate_within_a_step_fails_all() -> None:
    setting = running(2)
    setting.step(0, 0)
    setting.push_all(1, 0)
    setting.say(1, commit_message(0, rate=2 * RATE))
    setting.failed(LayoutMismatch, r"rank 1 has learning rate 0\.5 at step 0, rank 0 has 0\.25")


def test_a_server_that_cannot_update_says_so_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "common.tensors.flat_optimizer", None)  # type: ignore[arg-type]
    setting = open_group(1)
    enter(setting.group, register_message(0), setting.inboxes[0])
    with pytest.raises(UsageError) as caught:
        setting.group.handle(0, parameters_message(0, parameters_of(0)))
    setting.group.fail(caught.value)
    setting.failed(UsageError, "Paddle is not installed")
