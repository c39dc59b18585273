"""What trainers of three small parameters say to a coordinator, and inboxes of what they hear."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import GradSyncError, PeerStalled, error_from_name
from common.network.gradsync_pb2 import (
    Chunk,
    Commit,
    Configure,
    Gather,
    Goodbye,
    Hello,
    Keep,
    ServerMessage,
    StatePiece,
    TrainerMessage,
)
from common.tensors.arena import Arena, FloatArray, Layout
from common.tensors.buckets import Bucket
from common.tensors.optimizers import SGD, Momentum, Optimizer
from common.tensors.parts import Accumulator
from ps.coordinator.coordinator import Coordinator
from ps.coordinator.liveness import ServerQueue
from ps.planes.protobuf_messages import data_of, describe, optimizer_message
from ps.planes.wire_format import Outgoing, read_server
from tests.support.wire import to_bytes

__all__ = [
    "BUCKETS",
    "DEADLINE_S",
    "LAYOUT",
    "NAMES",
    "RATE",
    "SHAPES",
    "Clock",
    "Inbox",
    "Momenta",
    "Setting",
    "commit_message",
    "configure_message",
    "configured",
    "drawn",
    "enter",
    "expected_after",
    "gather_message",
    "goodbye_message",
    "gradient_message",
    "gradients_of",
    "keep_message",
    "loaded",
    "open_group",
    "outcome_of",
    "parameters_message",
    "parameters_of",
    "register_message",
    "registered",
    "running",
    "served",
    "stalled",
    "state_message",
    "update",
    "update_message",
]

SHAPES = [("w", (5, 9)), ("b", (9,)), ("v", (3,))]
LAYOUT = Layout.of(SHAPES)  # 48 + 16 + 16 elements
BUCKETS = (Bucket(64, 80), Bucket(0, 64))
RATE = 0.25
WATCH = "gradsync-silence"  # the name of the threads that look for the frozen
DEADLINE_S = 5.0  # of what is done at once, or after a limit of 0.3 s


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


def enter(group: Coordinator, message: TrainerMessage, queue: ServerQueue) -> None:
    """Say hello and register."""
    hello = Hello(epoch=message.register.epoch, rank=message.register.rank)
    group.handle(group.enter(TrainerMessage(hello=hello), queue), message)


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


def drawn(messages: Iterable[ServerMessage | Outgoing]) -> list[ServerMessage]:
    """What a trainer parses, drawn one after the other, with the words as data; signs of life left out."""
    parsed = [read_server(to_bytes(message)) for message in messages]
    for frame in parsed:
        if frame.words is not None:
            frame.message.parameters.data = frame.words.tobytes()
    return [frame.message for frame in parsed if frame.message.WhichOneof("kind") not in (None, "alive")]


class Inbox(ServerQueue):
    """Takes messages at once, as a trainer on a fast line would."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[ServerMessage] = []
        self.signs = 0  # of life
        self.asked: list[str] = []  # lines to say, mostly empty, that came when a sign of life was asked for
        self.ended = 0

    def put(self, messages: Iterable[ServerMessage | Outgoing], *, at: int | None = None) -> None:
        every = list(messages)
        self.received += drawn(every)
        alive = (m.alive for m in every if isinstance(m, ServerMessage) and m.WhichOneof("kind") == "alive")
        self.asked += (each.say for each in alive)
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

    group: Coordinator
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
        assert re.search(text, str(error)), str(error)
        told = [inbox.failure for inbox in self.inboxes]
        assert {(type(other), str(other)) for other in told} == {(kind, str(error))}


def outcome_of(group: Coordinator) -> BaseException | None:
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
    return Setting(Coordinator(nranks, **options), [Inbox() for _ in range(nranks)])


def running(nranks: int, *, mode: str = "", **options: object) -> Setting:
    """All have registered and hold rank 0's parameters."""
    setting = open_group(nranks, **options)
    for rank in range(nranks):
        message = register_message(rank)
        message.register.mode = mode
        enter(setting.group, message, setting.inboxes[rank])
    setting.say(0, parameters_message(0, parameters_of(0)))
    assert [inbox.version for inbox in setting.inboxes] == [0] * nranks
    return setting


NAMES = ["w", "b", ""]  # the last slot is no parameter, and is never updated


def configure_message(rank: int, optimizer: Optimizer | None = None, names: Sequence[str] = NAMES) -> TrainerMessage:
    named = optimizer_message(optimizer or Momentum())
    return TrainerMessage(configure=Configure(rank=rank, optimizer=named, names=names))


def keep_message(updates: int = 0, step: int = 0, epoch: int = 0) -> TrainerMessage:
    return TrainerMessage(keep=Keep(epoch=epoch, updates=updates, step=step))


def state_message(piece: StatePiece) -> TrainerMessage:
    return TrainerMessage(state=piece)


def update_message(step: int, **fields: object) -> TrainerMessage:
    return TrainerMessage(commit=Commit(step=step, learning_rate=RATE, update=True, **fields))


def registered(nranks: int, *, inboxes: Sequence[ServerQueue] = (), **options: object) -> Setting:
    """As `running`, but with the optimizer still to be named."""
    setting = Setting(Coordinator(nranks, **options), list(inboxes) or [Inbox() for _ in range(nranks)])
    for rank in range(nranks):
        enter(setting.group, register_message(rank, optimizer=None), setting.inboxes[rank])
    setting.say(0, parameters_message(0, parameters_of(0)))
    return setting


def configured(nranks: int, *, inboxes: Sequence[ServerQueue] = (), **options: object) -> Setting:
    setting = registered(nranks, inboxes=inboxes, **options)
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


def loaded(velocity: FloatArray) -> list[Accumulator]:
    slots = LAYOUT.slots[:2]
    return [Accumulator(f"{s.name}_v", i, s.size, 0, velocity[s.start : s.stop]) for i, s in enumerate(slots)]


def stalled(setting: Setting, text: str, *, timeout: float) -> None:
    """The group fails no earlier than its limit, and not much later."""
    begin = time.monotonic()
    setting.failed(PeerStalled, rf"^rank {text} for {timeout:g} s;")
    assert timeout - 0.05 < time.monotonic() - begin < timeout + 5.0


class Clock:
    """The group's: moves only when told."""

    def __init__(self) -> None:
        self._now = 0.0
        self._looks: Counter[threading.Thread] = Counter()
        self._looked = threading.Condition()

    def __call__(self) -> float:
        with self._looked:
            self._looks[threading.current_thread()] += 1
            self._looked.notify_all()
            return self._now

    def advance(self, seconds: float) -> None:
        """Time passes, and every watch has seen it (unless it has ended for that)."""
        with self._looked:
            self._now += seconds
            before = self._looks.copy()
            self._looked.wait_for(lambda: self._was_seen_since(before), 2.0)

    def _was_seen_since(self, before: Counter[threading.Thread]) -> bool:
        watches = [thread for thread in self._looks if thread.name == WATCH]
        seen = [self._looks[watch] >= before[watch] + 2 or not watch.is_alive() for watch in watches]
        return bool(seen) and all(seen)
