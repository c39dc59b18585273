"""A server's trainers in any order of messages, with plain outboxes and no gRPC: whole lives, and every failure."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import (
    GradSyncError,
    LayoutMismatch,
    PeerLost,
    PeerStalled,
    ProtocolError,
    StaleEpoch,
    UsageError,
    error_from_name,
)
from common.network.gradsync_pb2 import (
    Chunk,
    Commit,
    Configure,
    Gather,
    Goodbye,
    Hello,
    ServerMessage,
    StatePiece,
    StateRequest,
    TrainerMessage,
)
from common.network.rendezvous import GRACE
from common.system.memory import SegmentPool
from common.tensors.arena import Arena, FloatArray, Layout
from common.tensors.buckets import Bucket
from common.tensors.optimizers import SGD, Adam, Momentum, Optimizer
from common.tensors.updater import Accumulator, InPieces, Part, StatefulUpdater
from ps.coordinator.training_group import ServerOutbox, TrainingGroup
from ps.planes.frames import Outgoing, to_bytes
from ps.planes.lanes import Lanes
from ps.planes.shared_memory import OthersMemory, place_of, probe_of
from ps.planes.wire import data_of, describe, optimizer_message, state_of, state_pieces
from ps.store.shards import plan_shards, shard_of_bucket
from ps.store.store import Store
from tests.support.groups import assert_same_bits
from tests.support.numpy_updater import numpy_piece_updater

SHAPES = [("w", (5, 9)), ("b", (9,)), ("v", (3,))]
LAYOUT = Layout.of(SHAPES)  # 48 + 16 + 16 elements
BUCKETS = (Bucket(64, 80), Bucket(0, 64))
RATE = 0.25
DEADLINE_S = 5.0  # of what is done at once, or after a limit of 0.3 s


class NumpyMomentum:
    """v = v / 2 + g; p -= lr * v, for each part that is used."""

    def __init__(self, parameters: FloatArray, gradients: FloatArray, parts: Sequence[Part]) -> None:
        self.parameters, self.gradients, self.parts = parameters, gradients, parts
        self.velocity: dict[str, FloatArray] = {}

    def step(self, learning_rate: float, used: bytes = b"") -> None:
        for part in self.parts:
            if not used or used[part.slot]:
                gradients = self.gradients[part.start : part.stop]
                v = self.velocity.get(part.name, np.zeros(part.count, np.float32)) / np.float32(2) + gradients
                self.velocity[part.name] = v
                self.parameters[part.start : part.stop] -= np.float32(learning_rate) * v

    def state(self) -> list[Accumulator]:
        parts = [part for part in self.parts if part.name in self.velocity]
        return [Accumulator(f"{p.name}_v", p.slot, p.size, p.first, self.velocity[p.name].copy()) for p in parts]

    def load(self, state: Sequence[Accumulator]) -> None:
        given = {each.key.removesuffix("_v"): each.values for each in state}
        for part in self.parts:
            if part.name not in given:
                raise UsageError(f"the optimizer state does not fit the optimizer: {part.name} not found")
            self.velocity[part.name] = given[part.name]


def numpy_part_updater(
    optimizer: Optimizer, parameters: FloatArray, gradients: FloatArray, parts: Sequence[Part]
) -> StatefulUpdater:
    """Stands in for `make_part_updater`."""
    return NumpyMomentum(parameters, gradients, parts)


@pytest.fixture(autouse=True, scope="module")
def _without_paddle() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ps.coordinator.training_group.make_piece_updater", numpy_piece_updater)
        patch.setattr("ps.coordinator.training_group.make_part_updater", numpy_part_updater)
        patch.setattr("ps.coordinator.training_group.PIECE", 32)
        yield


# ---- what trainers say ------------------------------------------------------------------------------------------


def gradients_of(rank: int, step: int) -> FloatArray:
    """Small whole numbers, whose float32 sums are exact in any order."""
    return np.random.default_rng([rank, step]).integers(-999, 999, LAYOUT.length).astype(np.float32)


def parameters_of(rank: int) -> FloatArray:
    return np.random.default_rng(rank).standard_normal(LAYOUT.length).astype(np.float32)


def expected_after(steps: int, nranks: int) -> FloatArray:
    parameters = parameters_of(0)
    for step in range(steps):
        total = np.sum([gradients_of(rank, step) for rank in range(nranks)], axis=0, dtype=np.float32)
        parameters -= np.float32(RATE) * (total * np.float32(1 / nranks))
    return parameters


def enter(group: TrainingGroup, message: TrainerMessage, outbox: ServerOutbox) -> None:
    """Say hello and register."""
    hello = Hello(epoch=message.register.epoch, rank=message.register.rank)
    group.handle(group.enter(TrainerMessage(hello=hello), outbox), message)


def register_message(
    rank: int,
    *,
    shapes: Iterable[tuple[str, tuple[int, ...]]] = SHAPES,
    buckets: tuple[Bucket, ...] = BUCKETS,
    optimizer: Optimizer | None = SGD(),  # noqa: B008 - frozen
    epoch: int = 0,
) -> TrainerMessage:
    arena = Arena(Layout.of(shapes), buckets=buckets)
    return TrainerMessage(register=describe(arena, optimizer, rank=rank, epoch=epoch))


def parameters_message(start: int, data: FloatArray, *, epoch: int = 0) -> TrainerMessage:
    return TrainerMessage(parameters=Chunk(epoch=epoch, start=start, data=data.tobytes()))


def gradient_message(rank: int, step: int, bucket: int, start: int, stop: int) -> TrainerMessage:
    data = gradients_of(rank, step)[start:stop].tobytes()
    chunk = Chunk(epoch=0, step=step, bucket=bucket, start=start, data=data)
    return TrainerMessage(gradients=chunk)


def commit_message(
    step: int, *, rate: float = RATE, epoch: int = 0, update: bool = True, ahead: bool = False
) -> TrainerMessage:
    return TrainerMessage(commit=Commit(epoch=epoch, step=step, learning_rate=rate, update=update, ahead=ahead))


def gather_message(sequence: int, data: bytes = b"", *, epoch: int = 0) -> TrainerMessage:
    return TrainerMessage(gather=Gather(epoch=epoch, sequence=sequence, size=len(data), data=data))


def goodbye_message(reason: str = "") -> TrainerMessage:
    return TrainerMessage(goodbye=Goodbye(reason=reason))


# ---- what they hear ---------------------------------------------------------------------------------------------


def drawn(messages: Iterable[ServerMessage | Outgoing]) -> list[ServerMessage]:
    """What a trainer parses, drawn one after the other; signs of life left out."""
    parsed = [ServerMessage.FromString(to_bytes(message)) for message in messages]
    return [message for message in parsed if message.WhichOneof("kind")]


class Inbox(ServerOutbox):
    """Takes messages at once, as a trainer on a fast line would."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[ServerMessage] = []
        self.signs = 0  # of life
        self.ended = 0

    def put(self, messages: Iterable[ServerMessage | Outgoing], *, at: int | None = None) -> None:
        every = list(messages)
        self.received += drawn(every)
        self.signs += every == [ServerMessage()]

    def end(self) -> None:
        self.ended += 1

    def of_kind(self, kind: str) -> list[ServerMessage]:
        return [m for m in self.received if m.WhichOneof("kind") == kind]

    @property
    def version(self) -> int:
        served = self.of_kind("served")
        return served[-1].served.step if served else -1

    def parameters(self, step: int, into: FloatArray) -> None:
        for message in self.of_kind("parameters"):
            if message.parameters.step == step:
                data = data_of(message.parameters)
                into[message.parameters.start : message.parameters.start + data.size] = data

    @property
    def failure(self) -> GradSyncError:
        (message,) = self.of_kind("failure")
        assert self.received[-1] is message  # nothing follows
        assert self.ended
        return error_from_name(message.failure.kind, message.failure.message)


@dataclass
class Setting:
    """A group with inboxes of all its trainers; every later message goes the way the servicer sends it."""

    group: TrainingGroup
    inboxes: list[Inbox]

    def say(self, rank: int, message: TrainerMessage) -> None:
        try:
            self.group.handle(rank, message)
        except GradSyncError as exc:
            self.group.fail(exc)

    def push_all(self, rank: int, step: int) -> None:
        for bucket, where in enumerate(BUCKETS):
            self.say(rank, gradient_message(rank, step, bucket, where.start, where.stop))

    def step(self, rank: int, step: int, *, update: bool = True) -> None:
        self.push_all(rank, step)
        self.say(rank, commit_message(step, update=update))

    def failed(self, kind: type[GradSyncError], text: str) -> None:
        """`wait` raises and every trainer has been told the same, of exactly this kind."""
        error = outcome_of(self.group)
        assert type(error) is kind
        assert re.search(text, str(error))
        told = [inbox.failure for inbox in self.inboxes]
        assert {(type(other), str(other)) for other in told} == {(kind, str(error))}


def outcome_of(group: TrainingGroup) -> BaseException | None:
    """What `wait` raises, None if it returns; an AssertionError if it does neither."""
    raised: list[BaseException | None] = []

    def wait() -> None:
        try:
            group.wait()
            raised.append(None)
        except BaseException as exc:
            raised.append(exc)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    waiter.join(DEADLINE_S)
    assert raised, "the group has not ended"
    return raised[0]


def open_group(nranks: int, **options: object) -> Setting:
    return Setting(TrainingGroup(nranks, **options), [Inbox() for _ in range(nranks)])


def running(nranks: int, *, timeout: float = 30.0) -> Setting:
    """All have registered and hold rank 0's parameters."""
    setting = open_group(nranks, timeout=timeout)
    for rank in range(nranks):
        enter(setting.group, register_message(rank), setting.inboxes[rank])
    setting.say(0, parameters_message(0, parameters_of(0)))
    assert [inbox.version for inbox in setting.inboxes] == [0] * nranks
    return setting


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


@settings(max_examples=60, deadline=None)
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


def test_a_plain_outbox_gives_messages_in_order_and_ends() -> None:
    group, outbox = TrainingGroup(1), ServerOutbox()
    enter(group, register_message(0), outbox)
    group.handle(0, parameters_message(0, parameters_of(0)))
    group.handle(0, gather_message(0, b"abc"))
    group.handle(0, goodbye_message())
    group.lost(0)
    assert outcome_of(group) is None
    plane, first, *rest = drawn(outbox)
    assert plane.plane.refusal == "the trainer does not offer its memory"
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
    group, slow = TrainingGroup(2), ServerOutbox()
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
    def refuse(optimizer: Optimizer, parameters: FloatArray, pieces: object, *, helper: object) -> InPieces:
        raise UsageError("Paddle is not installed here")

    monkeypatch.setattr("ps.coordinator.training_group.make_piece_updater", refuse)
    setting = open_group(1)
    enter(setting.group, register_message(0), setting.inboxes[0])
    with pytest.raises(UsageError) as caught:
        setting.group.handle(0, parameters_message(0, parameters_of(0)))
    setting.group.fail(caught.value)
    setting.failed(UsageError, "Paddle is not installed")


# ---- the optimizer of a user's program --------------------------------------------------------------------------

NAMES = ["w", "b", ""]  # the last slot is no parameter, and is never updated


def configure_message(rank: int, optimizer: Optimizer | None = None, names: Sequence[str] = NAMES) -> TrainerMessage:
    named = optimizer_message(optimizer or Momentum())
    return TrainerMessage(configure=Configure(rank=rank, optimizer=named, names=names))


def state_message(piece: StatePiece) -> TrainerMessage:
    return TrainerMessage(state=piece)


def request_message(epoch: int = 0) -> TrainerMessage:
    return TrainerMessage(state_request=StateRequest(epoch=epoch))


def update_message(step: int, **fields: object) -> TrainerMessage:
    return TrainerMessage(commit=Commit(step=step, learning_rate=RATE, update=True, **fields))


def registered(nranks: int, *, timeout: float = 30.0, inboxes: Sequence[ServerOutbox] = ()) -> Setting:
    """As `running`, but with the optimizer still to be named."""
    setting = Setting(TrainingGroup(nranks, timeout=timeout), list(inboxes) or [Inbox() for _ in range(nranks)])
    for rank in range(nranks):
        enter(setting.group, register_message(rank, optimizer=None), setting.inboxes[rank])
    setting.say(0, parameters_message(0, parameters_of(0)))
    return setting


def configured(nranks: int, *, timeout: float = 30.0, inboxes: Sequence[ServerOutbox] = ()) -> Setting:
    setting = registered(nranks, timeout=timeout, inboxes=inboxes)
    for rank in reversed(range(nranks)):
        setting.say(rank, configure_message(rank))
    return setting


def update(setting: Setting, step: int, ranks: Iterable[int] = (1, 0), **fields: object) -> None:
    for rank in ranks:
        setting.push_all(rank, step)
        setting.say(rank, update_message(step, **fields))


class Momenta:
    """The parameters and velocities that two ranks' group must have."""

    def __init__(self) -> None:
        self.parameters, self.velocity = parameters_of(0), np.zeros(LAYOUT.length, np.float32)

    def update(self, step: int, used: bytes = b"\1\1\0") -> None:
        mean = (gradients_of(0, step) + gradients_of(1, step)) * np.float32(0.5)
        for slot, name, use in zip(LAYOUT.slots, NAMES, used, strict=True):
            if name and use:
                where = slice(slot.start, slot.stop)
                self.velocity[where] = self.velocity[where] / np.float32(2) + mean[where]
                self.parameters[where] -= np.float32(RATE) * self.velocity[where]

    def state(self) -> dict[str, bytes]:
        slots = LAYOUT.slots[:2]
        return {f"{slot.name}_v": self.velocity[slot.start : slot.stop].tobytes() for slot in slots}


def served(inbox: Inbox, step: int) -> FloatArray:
    found = np.full(LAYOUT.length, np.nan, np.float32)
    inbox.parameters(step, found)
    return found


def states(inbox: Inbox) -> list[dict[str, bytes]]:
    """The optimizer states that have arrived whole."""
    found, begun = [], []
    for message in inbox.of_kind("state"):
        begun.append(message.state)
        if message.state.last:
            found.append({each.key: each.values.tobytes() for each in state_of(begun)})
            begun = []
    assert not begun
    return found


def test_a_named_optimizer_updates_what_is_used() -> None:
    setting, expected = configured(2), Momenta()
    update(setting, 0)
    expected.update(0)
    update(setting, 1, used=b"\0\1\1")
    expected.update(1, b"\0\1\0")
    setting.push_all(0, 2)
    setting.say(0, update_message(2, used=b"\1\0\0"))
    setting.push_all(1, 2)
    setting.say(1, update_message(2, used=b"\0\1\0"))
    expected.update(2)
    for inbox in setting.inboxes:
        assert served(inbox, 3).tobytes() == expected.parameters.tobytes()


def test_averages_and_updates_follow_each_other() -> None:
    setting, expected = registered(2), Momenta()
    for rank in (0, 1):
        setting.step(rank, 0, update=False)
    for rank in (0, 1):  # as a program's first optimizer.step() does
        setting.say(rank, configure_message(rank))
        setting.say(rank, update_message(1, again=True))
    expected.update(0)
    update(setting, 2)
    expected.update(2)
    mean = (gradients_of(0, 0) + gradients_of(1, 0)) * np.float32(0.5)
    for inbox in setting.inboxes:
        assert served(inbox, 1).tobytes() == mean.tobytes()
        assert served(inbox, 3).tobytes() == expected.parameters.tobytes()


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (configure_message(1, Adam()), r"Momentum\(.*\) against Adam\(.*\); make the same optimizer on all ranks$"),
        (configure_message(1, Momentum(momentum=0.5)), r".*momentum=0\.9.* against Momentum\(.*momentum=0\.5"),
        (configure_message(1, None, ["w", "c", ""]), r"other parameter names against Momentum\("),
    ],
    ids=["optimizer", "setting", "names"],
)
def test_trainers_that_name_different_optimizers_are_told(second: TrainerMessage, text: str) -> None:
    setting = registered(2)
    setting.say(0, configure_message(0))
    setting.say(1, second)
    setting.failed(LayoutMismatch, f"^rank 0 and rank 1 disagree on the optimizer: {text}")


def without_optimizer() -> TrainerMessage:
    return TrainerMessage(configure=Configure(rank=1, names=NAMES))


@pytest.mark.parametrize(
    "message",
    [configure_message(1, None, NAMES[:2]), configure_message(1, None, [*NAMES, "x"]), without_optimizer()],
    ids=["a name too few", "a name too many", "no optimizer"],
)
def test_a_wrong_configuration_fails_all(message: TrainerMessage) -> None:
    setting = registered(2)
    setting.say(1, message)
    setting.failed(ProtocolError, "^rank 1 sent a wrong configuration at step 0$")


def test_a_configuration_beside_a_registered_optimizer_fails_all() -> None:
    setting = running(2)
    setting.say(1, configure_message(1))
    setting.failed(ProtocolError, "^rank 1 sent a wrong configuration at step 0$")


def test_a_configuration_of_another_epoch_fails_all() -> None:
    setting = registered(2)
    setting.say(1, TrainerMessage(configure=Configure(epoch=4, rank=1, names=NAMES)))
    setting.failed(StaleEpoch, "^rank 1 sent a message of epoch 4, this is epoch 0$")


@pytest.mark.parametrize("message", [configure_message(1), state_message(StatePiece(last=True))])
def test_an_optimizer_before_anyone_registered_is_refused(message: TrainerMessage) -> None:
    setting = open_group(2)
    with pytest.raises(ProtocolError, match=r"^rank 1 sent (data before registering|optimizer state at step 0)"):
        setting.group.handle(1, message)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_without_naming_an_optimizer_fails_all(rank: int) -> None:
    setting = registered(2)
    setting.say(1 - rank, configure_message(1 - rank))
    setting.push_all(rank, 0)
    setting.say(rank, update_message(0))
    setting.failed(ProtocolError, f"^rank {rank} asked for an update at step 0 without naming an optimizer$")


def test_an_unknown_optimizer_fails_all() -> None:
    setting, message = registered(2), configure_message(0)
    message.configure.optimizer.name = "adamm"
    setting.say(0, message)
    setting.failed(UsageError, "unknown optimizer 'adamm'; did you mean 'adam'")


# ---- its state --------------------------------------------------------------------------------------------------


def test_the_state_is_told_to_whoever_asks_whenever_it_asks() -> None:
    setting, expected = configured(2), Momenta()
    setting.say(1, request_message())  # there is none yet
    update(setting, 0)
    expected.update(0)
    first = expected.state()
    setting.say(1, request_message())
    setting.push_all(0, 1)
    setting.say(0, request_message())  # after its pushes
    setting.say(0, update_message(1))
    setting.say(1, request_message())  # while the other waits for it
    setting.push_all(1, 1)
    setting.say(1, request_message())
    setting.say(1, update_message(1))
    expected.update(1)
    setting.say(0, request_message())
    assert states(setting.inboxes[0]) == [first, expected.state()]
    assert states(setting.inboxes[1]) == [{}, first, first, first]


def test_a_state_told_is_that_of_its_moment_for_a_slow_reader() -> None:
    setting = configured(2, inboxes=[Inbox(), ServerOutbox()])
    update(setting, 0)
    expected = Momenta()
    expected.update(0)
    setting.say(1, request_message())
    update(setting, 1)
    setting.group.fail(PeerLost("end of test"))
    pieces = [m.state for m in drawn(setting.inboxes[1]) if m.WhichOneof("kind") == "state"]
    assert {each.key: each.values.tobytes() for each in state_of(pieces)} == expected.state()


def test_a_state_asked_for_where_there_is_none_fails_all() -> None:
    setting = registered(2)
    setting.say(1, request_message())
    setting.failed(ProtocolError, "^rank 1 asked for optimizer state at step 0, but there is no optimizer$")


def test_a_state_asked_for_in_another_epoch_fails_all() -> None:
    setting = configured(2)
    setting.say(1, request_message(epoch=3))
    setting.failed(StaleEpoch, "^rank 1 sent a message of epoch 3, this is epoch 0$")


def loaded(velocity: FloatArray) -> list[Accumulator]:
    slots = LAYOUT.slots[:2]
    return [Accumulator(f"{s.name}_v", i, s.size, 0, velocity[s.start : s.stop]) for i, s in enumerate(slots)]


@pytest.mark.parametrize("limit", [4, 12, 400])
def test_a_state_of_many_pieces_is_loaded_when_the_last_has_come(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.planes.wire.CHUNK_BYTES", limit)
    setting, expected = configured(2), Momenta()
    update(setting, 0)
    expected.update(0)
    before = expected.state()
    expected.velocity = np.arange(LAYOUT.length, dtype=np.float32)
    *pieces, last = state_pieces(loaded(expected.velocity), epoch=0)
    assert len(pieces) == {4: 54, 12: 18, 400: 2}[limit]
    for piece in pieces:
        setting.say(0, state_message(piece))
    setting.say(1, request_message())
    setting.say(0, state_message(last))
    setting.say(1, request_message())
    assert states(setting.inboxes[1]) == [before, expected.state()]
    update(setting, 1)
    expected.update(1)
    assert served(setting.inboxes[1], 2).tobytes() == expected.parameters.tobytes()


def test_a_state_can_be_loaded_before_the_first_update_and_twice() -> None:
    setting, expected = configured(2), Momenta()
    for factor in (3, 5):
        expected.velocity = factor * np.arange(LAYOUT.length, dtype=np.float32)
        for piece in state_pieces(loaded(expected.velocity), epoch=0):
            setting.say(0, state_message(piece))
    update(setting, 0)
    expected.update(0)
    assert served(setting.inboxes[0], 1).tobytes() == expected.parameters.tobytes()


def test_a_state_from_another_rank_than_0_fails_all() -> None:
    setting = configured(2)
    setting.say(1, state_message(StatePiece(last=True)))
    setting.failed(ProtocolError, "^rank 1 sent optimizer state at step 0, expected it from rank 0 only$")


def test_a_state_of_another_epoch_fails_all() -> None:
    setting = configured(2)
    setting.say(0, state_message(StatePiece(epoch=2, last=True)))
    setting.failed(StaleEpoch, "^rank 0 sent a message of epoch 2, this is epoch 0$")


def test_a_state_with_something_missing_is_a_usage_error_to_all() -> None:
    setting = configured(3)
    for piece in state_pieces(loaded(np.ones(LAYOUT.length, np.float32))[:1], epoch=0):
        setting.say(0, state_message(piece))
    setting.failed(UsageError, "^the optimizer state does not fit the optimizer: b not found$")


def test_a_state_of_an_unknown_dtype_fails_all() -> None:
    setting = configured(2)
    setting.say(0, state_message(StatePiece(key="w_v", dtype="object", size=45, data=b"abcd")))
    setting.say(0, state_message(StatePiece(last=True)))
    setting.failed(ProtocolError, "^optimizer state w_v is 'object', not one of float32, float64$")


# ---- parameters sent again --------------------------------------------------------------------------------------


def test_parameters_sent_again_are_those_that_the_update_begins_with() -> None:
    setting, expected = configured(2), Momenta()
    update(setting, 0)
    expected.update(0)
    new = parameters_of(9)
    for start in (0, 33):
        stop = 33 if start == 0 else LAYOUT.length
        setting.say(0, TrainerMessage(parameters=Chunk(step=1, start=start, data=new[start:stop].tobytes())))
    update(setting, 1, replaced=True)
    expected.parameters = new
    expected.update(1)
    for inbox in setting.inboxes:
        assert served(inbox, 2).tobytes() == expected.parameters.tobytes()


def test_parameters_sent_again_do_not_change_those_that_a_slow_trainer_still_reads() -> None:
    """Rank 0 goes on, replaces them and commits before rank 1 has drawn what was served."""
    setting = configured(2, inboxes=[Inbox(), ServerOutbox()])
    update(setting, 0)
    expected = Momenta()
    expected.update(0)
    setting.say(0, TrainerMessage(parameters=Chunk(step=1, data=parameters_of(9).tobytes())))
    update(setting, 1, ranks=[0], replaced=True)
    setting.group.fail(PeerLost("end of test"))
    served = [m.parameters for m in drawn(setting.inboxes[1]) if m.WhichOneof("kind") == "parameters"]
    found = np.concatenate([data_of(chunk) for chunk in served if chunk.step == 1])
    assert found.tobytes() == expected.parameters.tobytes()


@pytest.mark.parametrize(("rank", "start"), [(1, 0), (0, 5)])
def test_parameters_sent_again_must_be_rank_0s_from_the_start(rank: int, start: int) -> None:
    setting = configured(2)
    setting.say(rank, parameters_message(start, np.ones(1, np.float32)))
    setting.failed(ProtocolError, f"^rank {rank} sent parameters from word {start}, expected 0 from rank 0$")


def test_replacing_without_sending_parameters_fails_all() -> None:
    setting = configured(2)
    setting.push_all(0, 0)
    setting.say(0, update_message(0, replaced=True))
    setting.failed(ProtocolError, "^rank 0 replaced 0 of 80 words at step 0$")


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
    assert "rank 1 finished at step 0 while others go on; give all the same --steps" in str(error)
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


# ---- silence ----------------------------------------------------------------------------------------------------


def stalled(setting: Setting, text: str, *, timeout: float) -> None:
    """The group fails no earlier than its limit, and not much later."""
    begin = time.monotonic()
    setting.failed(PeerStalled, rf"^rank {text} for {timeout:g} s;")
    assert timeout - 0.05 < time.monotonic() - begin < timeout + 5.0


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


class Clock:
    """Stands in for the module `time` of the group: moves only when told."""

    def __init__(self) -> None:
        self._now, self._looks = 0.0, 0
        self._looked = threading.Condition()

    def monotonic(self) -> float:
        with self._looked:
            self._looks += 1
            self._looked.notify_all()
            return self._now

    def advance(self, seconds: float) -> None:
        """Time passes, and the watchdog has seen it (unless it has ended for that)."""
        with self._looked:
            self._now += seconds
            enough = self._looks + 2
            self._looked.wait_for(lambda: self._looks >= enough, 2.0)


def test_a_slow_trainer_that_keeps_sending_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("ps.coordinator.training_group.time", clock)
    setting = running(2, timeout=10.0)
    setting.step(0, 0)
    for start in range(0, 64, 16):
        clock.advance(9.0)
        setting.say(1, gradient_message(1, 0, 1, start, start + 16))
    assert not setting.inboxes[0].of_kind("failure")
    clock.advance(11.0)
    setting.failed(PeerStalled, "^rank 1 did not take part in step 0 for 10 s")


def test_who_waits_hears_that_others_still_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would take the server for frozen, for its own limit counts from its own commit."""
    clock = Clock()
    monkeypatch.setattr("ps.coordinator.training_group.time", clock)
    setting = running(2, timeout=10.0)
    setting.step(0, 0)
    signs = []
    for start in range(0, 64, 16):
        clock.advance(GRACE * 0.4)
        setting.say(1, gradient_message(1, 0, 1, start, start + 16))
        signs.append((setting.inboxes[0].signs, setting.inboxes[1].signs))
    assert signs == [(0, 0), (1, 1), (1, 1), (2, 2)]  # at most one in GRACE / 2, so that the server complains first


def test_a_trainer_that_keeps_sending_parameters_or_state_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("ps.coordinator.training_group.time", clock)
    monkeypatch.setattr("ps.planes.wire.CHUNK_BYTES", 60)
    setting = configured(2, timeout=10.0)
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


def test_who_joined_but_never_came_is_named() -> None:
    group = TrainingGroup(2, timeout=0.3)
    group.enter(TrainerMessage(hello=Hello(epoch=0, rank=0)), Inbox())
    group.expect()
    error = outcome_of(group)
    assert isinstance(error, PeerStalled)
    assert "rank 1 did not take part in step 0 for 0.3 s" in str(error)


def test_who_takes_long_between_coming_and_registering_is_not_blamed() -> None:
    group = TrainingGroup(2, timeout=0.2)
    group.expect()
    for rank in range(2):
        group.enter(TrainerMessage(hello=Hello(epoch=0, rank=rank)), Inbox())
    waiter = threading.Thread(target=group._watch, daemon=True)
    waiter.start()
    waiter.join(0.6)
    assert waiter.is_alive()
    assert group._failure is None
    group.fail(PeerLost("end of test"))


def test_parameters_after_the_start_are_refused_even_if_empty() -> None:
    setting = running(2)
    setting.say(0, TrainerMessage(parameters=Chunk(start=80)))
    setting.failed(ProtocolError, "rank 0 sent parameters from word 80")


def test_a_gather_of_more_than_it_announced_is_refused() -> None:
    setting = running(2)
    setting.say(1, TrainerMessage(gather=Gather(sequence=0, size=1, data=b"ab")))
    setting.failed(ProtocolError, "rank 1 sent 2 bytes of a gather of 1")


# ---- committed ahead --------------------------------------------------------------------------------------------


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


# ---- lanes ------------------------------------------------------------------------------------------------------


@dataclass
class Neighbours:
    """A group all of whose trainers are of this process, with the trainers' ends of its lanes."""

    setting: Setting
    lanes: Lanes

    def note(self, rank: int, message: TrainerMessage, *, ring: bool = True) -> None:
        lane = self.lanes.to_server[rank]
        if not ring:
            lane._bell = None
        assert lane.put(message.SerializeToString())

    def heard(self, rank: int) -> ServerMessage:
        note = self.lanes.to_trainer[rank].wait(DEADLINE_S)
        assert note is not None
        return ServerMessage.FromString(note)


@contextmanager
def neighbours(nranks: int, *, timeout: float = 30.0) -> Iterator[Neighbours]:
    with closing(SegmentPool()) as pool, OthersMemory() as memory:
        setting = open_group(nranks, timeout=timeout, pool=pool)
        for rank in range(nranks):
            message = register_message(rank)
            message.register.probe.CopyFrom(probe_of(pool.create(64)))
            enter(setting.group, message, setting.inboxes[rank])
        setting.say(0, parameters_message(0, parameters_of(0)))
        planes = [inbox.of_kind("plane")[0].plane for inbox in setting.inboxes]
        assert [inbox.version for inbox in setting.inboxes] == [0] * nranks
        gradients = [pool.empty(LAYOUT.length) for _ in range(nranks)]
        for rank, array in enumerate(gradients):
            array[...] = gradients_of(rank, 0)
            setting.say(rank, TrainerMessage(gradients_at=place_of(array, pool)))
        try:
            yield Neighbours(setting, Lanes(memory.segment(planes[0].lanes), nranks))
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
    with neighbours(2) as group, OthersMemory() as memory:
        store = group.setting.group._store
        for step, (ahead, update) in enumerate([(True, True), (True, True), (False, False)]):
            for rank in range(2):
                note = commit_message(step, ahead=ahead, update=update)
                pushes = [notice_message(bucket, step=step) for bucket in range(len(BUCKETS))]
                for message in [note, *pushes] if ahead else [*pushes, note]:
                    group.note(rank, message)
            served = [group.heard(rank).served for rank in range(2)]
            assert [each.step for each in served] == [step + 1] * 2
            assert (vars(store).keys() >= {"padded_gradients"}) == (not update)
            assert [each.HasField("gradients") for each in served] == [not update] * 2
        mean = (gradients_of(0, 0) + gradients_of(1, 0)) / np.float32(2)
        assert isinstance(store, Store)
        assert_same_bits(store.parameters, parameters_of(0) - np.float32(RATE) * mean - np.float32(RATE) * mean)
        assert_same_bits(memory.array(served[0].gradients, LAYOUT.length), mean)


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
