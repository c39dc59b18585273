"""Trainers, servers and a network that loses time, order and processes: one thread, one seed, no real clock.

The servers are the real state machines of ps/store, with NumPy's SGD. A seed decides everything: mode, sizes, how
messages are cut, how long each is under way, and what happens to them:

    doubled     a message comes twice, the second time whenever
    overtaken   a message comes before one that was sent earlier; what a store refuses is sent again
    killed      (sync) a process dies: the next epoch goes on from the last step that all had made, while messages of
                the old one are still under way

What is promised: a store refuses what does not fit, and is the same afterwards; every message is applied once; nothing
waits for ever; in sync and ssp the parameters have the bits of a run to which nothing happens, in async those of the
order of the commits.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from benchmarks.faults.simulated import RATE, PromiseBroken, Story, Training
from common.errors import GradSyncError, ProtocolError, StaleEpoch
from common.tensors.arena import FloatArray
from common.tensors.buckets import ALIGNMENT, plan_buckets
from common.tensors.optimizers import Optimizer
from ps.store.ending import Ending
from ps.store.modes import ASYNC, SYNC, Mode
from ps.store.relaxed_store import AsyncStore, RelaxedStore, SspStore
from ps.store.shards import Shard, plan_shards, shard_of_bucket
from ps.store.store import Progress, Store
from ps.store.sync_store import SyncStore

__all__ = ["Simulated", "simulate"]

MODES = (SYNC, SYNC, SYNC, Mode("ssp", 1), Mode("ssp", 2), ASYNC)
WAYS = ("doubled", "overtaken")
MOST_EVENTS = 10_000  # of a seed; a tenth of them is more than any needs


@dataclass(frozen=True)
class Simulated:
    """What a seed has come to.

    Args:
        digest: of the parameters.
        history: SHA-256 of all that happened, in order.
        refused: messages that a store has refused.
        kills: processes that died.
    """

    mode: str
    digest: str
    history: str
    refused: int
    kills: int


@dataclass(frozen=True)
class Message:
    """Of a trainer to a server; `data` is None for a commit."""

    number: int
    rank: int
    server: int
    epoch: int
    step: int
    bucket: int = 0
    start: int = 0
    data: FloatArray | None = None

    def __str__(self) -> str:
        what = "commit" if self.data is None else f"push {self.bucket} from {self.start} of {self.data.size}"
        return f"{self.number} rank {self.rank} to {self.server}, epoch {self.epoch} step {self.step}: {what}"


@dataclass(frozen=True)
class Setting(Training):
    """What is trained, and how."""

    mode: Mode
    shards: list[Shard]

    @staticmethod
    def drawn(seed: int, rng: random.Random) -> Setting:
        starts = sorted({0, *(ALIGNMENT * rng.randrange(8) for _ in range(rng.randrange(4)))})
        length = starts[-1] + ALIGNMENT * rng.randint(1, 4)
        limit = 4 * ALIGNMENT * rng.randint(1, 6)
        buckets = list(plan_buckets(starts, length, first_bytes=limit, bucket_bytes=limit))
        shards = list(plan_shards(length, rng.randint(1, 3)))
        mode, nranks = rng.choice(MODES), rng.randint(1, 4)
        return Setting(nranks, buckets, length, rng.randint(2, 5), seed, mode, shards)

    def gradients(self, rank: int, step: int, parameters: FloatArray) -> FloatArray:
        """In sync they depend on parameters."""
        return super().gradients(rank, step, parameters) if self.mode == SYNC else self.noise(rank, step)


class NumpySGD:
    def __init__(self, store: RelaxedStore, _: Optimizer | None) -> None:
        self._store = store

    def step(self, learning_rate: float, used: bytes = b"") -> None:  # noqa: ARG002 - all are
        self._store.parameters[...] -= np.float32(learning_rate) * self._store.gradients


class Trainer:
    """One rank: makes a step when the results of the last one have come from all servers."""

    def __init__(self, rank: int, setting: Setting) -> None:
        self.rank, self.setting = rank, setting
        self.parameters = [setting.initial()]  # after each step
        self.base = 0  # the step with which the epoch began
        self._came: dict[int, FloatArray] = {}  # of the step under way, by server

    @property
    def step(self) -> int:
        """The one under way, counted in its epoch, as servers do."""
        return len(self.parameters) - 1 - self.base

    @property
    def done(self) -> bool:
        return len(self.parameters) > self.setting.steps

    def roll_back(self, step: int) -> None:
        del self.parameters[step + 1 :]
        self.base, self._came = step, {}

    def takes(self, server: int, words: FloatArray) -> bool:
        """Whether with this result its step is over."""
        self._came[server] = words
        if len(self._came) < len(self.setting.shards):
            return False
        result = np.concatenate([self._came[s] for s in range(len(self.setting.shards))])
        self._came = {}
        self.parameters.append(self.parameters[-1] - RATE * result if self.setting.mode == SYNC else result)
        return True


class Simulation:
    """
    Args:
        log: is told of everything that happens.
    """

    def __init__(self, seed: int, log: Callable[[str], object] = lambda _: None) -> None:
        self._story = Story(seed, log)
        self._rng = self._story.rng
        self.setting = Setting.drawn(seed, self._rng)
        self._now, self._order = 0.0, count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers, self._epoch = count(), 0
        self._applied: set[int] = set()  # numbers of messages
        self._commits: list[list[tuple[int, int]]] = [[] for _ in self.setting.shards]  # (rank, step), in order
        self._links: dict[tuple[int, int], float] = {}  # when the last message arrives there
        self.refused = self.kills = 0
        self.trainers = [Trainer(rank, self.setting) for rank in range(self.setting.nranks)]
        self.stores = [self._new_store(index) for index in range(len(self.setting.shards))]

    def run(self) -> Simulated:
        """
        Raises:
            PromiseBroken: naming what and where.
        """
        self._tell(f"mode {self.setting.mode}, {self.setting.nranks} ranks, {len(self.stores)} servers")
        for trainer in self.trainers:
            self._later(partial(self._begin_step, trainer, self._epoch))
        if self.setting.mode == SYNC:
            for _ in range(self._rng.choice((0, 0, 1, 2))):
                self._at(self._rng.uniform(0, 5 * self.setting.steps), self._kill)
        for _ in range(MOST_EVENTS):
            if not self._events:
                break
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        if not all(trainer.done for trainer in self.trainers):
            raise PromiseBroken(f"somebody waits for ever: {[len(t.parameters) - 1 for t in self.trainers]} steps made")
        return Simulated(str(self.setting.mode), self._judge(), self._story.history, self.refused, self.kills)

    def _new_store(self, index: int) -> Store:
        setting = self.setting
        shard, arguments = setting.shards[index], (setting.buckets, setting.nranks)
        store: Store
        if setting.mode == SYNC:
            store = SyncStore(shard, *arguments, epoch=self._epoch, piece=ALIGNMENT * self._rng.randint(1, 4))
        elif setting.mode == ASYNC:
            store = AsyncStore(shard, *arguments, epoch=self._epoch, make_updater=NumpySGD)
        else:
            store = SspStore(shard, *arguments, staleness=setting.mode.number, epoch=self._epoch, make_updater=NumpySGD)
        store.parameters[...] = setting.initial()[shard.start : shard.stop]
        store.begin(None)
        return store

    def _tell(self, line: str) -> None:
        self._story.tell(self._now, line)

    def _at(self, moment: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), happen))

    def _later(self, happen: Callable[[], None]) -> None:
        self._at(self._now + self._rng.expovariate(2.0), happen)

    def _begin_step(self, trainer: Trainer, epoch: int) -> None:
        if epoch != self._epoch or trainer.done:
            return
        step = len(trainer.parameters) - 1
        gradients = self.setting.gradients(trainer.rank, step, trainer.parameters[-1])
        for server in range(len(self.stores)):
            for message in self._messages(trainer, server, gradients):
                self._send(message)

    def _messages(self, trainer: Trainer, server: int, gradients: FloatArray) -> Iterator[Message]:
        """A step's, to one server: the buckets in any order, each cut anywhere, and the commit."""
        label = (trainer.rank, server, self._epoch, trainer.step)
        order = list(enumerate(self.setting.buckets))
        self._rng.shuffle(order)
        for number, bucket in order:
            part = shard_of_bucket(self.setting.shards[server], bucket)
            start = part.start
            while start < part.stop:
                stop = min(part.stop, start + self._rng.randint(1, 3 * ALIGNMENT))
                yield Message(next(self._numbers), *label, number, start, gradients[start:stop].copy())
                start = stop
        yield Message(next(self._numbers), *label)

    def _send(self, message: Message) -> None:
        link, fate = (message.rank, message.server), self._rng.random()
        way = WAYS[0] if fate < 0.05 else WAYS[1] if fate < 0.1 else ""
        arrives = max(self._links.get(link, 0.0), self._now + self._rng.expovariate(4.0))
        if way == "overtaken":
            arrives += self._rng.expovariate(1.0)  # and those that follow do not wait for it
        else:
            self._links[link] = arrives
        self._at(arrives, partial(self._arrive, message))
        if way == "doubled":
            self._at(arrives + self._rng.expovariate(0.5), partial(self._arrive, message, again=True))

    def _arrive(self, message: Message, *, again: bool = False) -> None:
        store = self.stores[message.server]
        before = state_of(store)
        try:
            progress = self._deliver(store, message)
        except (ProtocolError, StaleEpoch) as exc:
            self._refuse(message, exc, again=again, unchanged=state_of(store) == before)
            return
        self._tell(f"taken: {message}")
        if message.epoch != self._epoch or message.number in self._applied:
            raise PromiseBroken(f"taken although it is of an old epoch, or was before: {message}")
        self._applied.add(message.number)
        if message.data is None:
            self._commits[message.server].append((message.rank, message.step))
        for result in progress.results:
            words = result.words.copy()
            for rank in result.ranks:
                self._later(partial(self._answer, rank, message.server, self._epoch, words))

    def _deliver(self, store: Store, message: Message) -> Progress:
        label = (message.rank, message.epoch, message.step)
        if message.data is not None:
            return store.push(*label, message.bucket, message.start, message.data)
        update = self.setting.mode != SYNC  # there trainers update by the average
        return store.commit(*label, Ending(float(RATE) if update else 0.0, update=update), b"")

    def _refuse(self, message: Message, why: GradSyncError, *, again: bool, unchanged: bool) -> None:
        self._tell(f"refused: {message}: {type(why).__name__}")
        self.refused += 1
        if not unchanged:
            raise PromiseBroken(f"refused, and yet something changed: {message}: {why}")
        if (message.epoch != self._epoch) != isinstance(why, StaleEpoch):
            raise PromiseBroken(f"refused for another reason than its epoch: {message}: {why}")
        if message.epoch == self._epoch and message.number not in self._applied and not again:
            self._later(partial(self._arrive, message))  # it came too early

    def _answer(self, rank: int, server: int, epoch: int, words: FloatArray) -> None:
        trainer = self.trainers[rank]
        if epoch == self._epoch and trainer.takes(server, words):
            self._tell(f"rank {rank} has made step {len(trainer.parameters) - 2}")
            self._later(partial(self._begin_step, trainer, epoch))

    def _kill(self) -> None:
        """Somebody dies. Servers are made anew; who did not die rolls back to the last step that all have made."""
        if all(trainer.done for trainer in self.trainers):
            return
        self.kills += 1
        self._epoch += 1
        step = min(len(trainer.parameters) - 1 for trainer in self.trainers)
        self._tell(f"killed; epoch {self._epoch} begins at step {step}")
        for trainer in self.trainers:
            trainer.roll_back(step)
        self.stores = [self._new_store(index) for index in range(len(self.stores))]
        self._links.clear()
        for trainer in self.trainers:
            self._later(partial(self._begin_step, trainer, self._epoch))

    def _judge(self) -> str:
        """The digest of the parameters, if they are right."""
        if self.setting.mode == SYNC:
            found, expected = [t.parameters[-1] for t in self.trainers], self.setting.undisturbed()
        else:
            found = [np.concatenate([store.parameters for store in self.stores])]
            expected = self._in_order_of_commits() if self.setting.mode == ASYNC else self.setting.undisturbed()
        if any(each.tobytes() != expected.tobytes() for each in found):
            raise PromiseBroken("the parameters are not those of the undisturbed run")
        return hashlib.sha256(expected.tobytes()).hexdigest()

    def _in_order_of_commits(self) -> FloatArray:
        parameters = self.setting.initial()
        for shard, commits in zip(self.setting.shards, self._commits, strict=True):
            mine = parameters[shard.start : shard.stop]
            for rank, step in commits:
                mine -= RATE * self.setting.gradients(rank, step, parameters)[shard.start : shard.stop]
        return parameters


def state_of(store: Store) -> tuple[object, ...]:
    """What can be seen of it."""
    return (store.parameters.tobytes(), tuple(store.steps), frozenset(store.waiting()), tuple(store.waiting_for()))


def simulate(seed: int, log: Callable[[str], object] = lambda _: None) -> Simulated:
    """What becomes of that seed, the same each time.

    Raises:
        PromiseBroken: a promise is.
    """
    try:
        return Simulation(seed, log).run()
    except PromiseBroken as exc:
        raise PromiseBroken(f"seed {seed}: {exc}") from exc
    except GradSyncError as exc:
        raise PromiseBroken(f"seed {seed}: {type(exc).__name__}: {exc}") from exc
