"""ssp, async and geo against models of plain NumPy: no update lost, doubled, or staler than the bound."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import GradSyncError, LayoutMismatch, ProtocolError, StaleEpoch
from common.tensors.arena import FloatArray
from common.tensors.buckets import Bucket, words
from common.tensors.optimizers import Optimizer
from common.tensors.updater import Updater
from ps.store.difference import AddDifference
from ps.store.ending import Ending
from ps.store.modes import ASYNC, Mode
from ps.store.relaxed_store import AsyncStore, RelaxedStore, SspStore
from ps.store.shards import Shard, plan_shards, shard_of_bucket
from ps.store.store import Progress
from tests.support.store_model import (
    EPOCH,
    LENGTH,
    PLAN,
    NumpySGD,
    everything_in,
    gradients_of,
    initial_parameters,
    mixed_plans,
    parameters_after,
    plans,
    rate_of,
    updated,
)
from tests.support.thorough import examples

SSP, GEO = Mode("ssp", 1), Mode("geo", 3)


def make(mode: Mode, shard: Shard, buckets: Sequence[Bucket], nranks: int, length: int) -> RelaxedStore:
    make_updater = AddDifference if mode.name == "geo" else numpy_updater
    store: RelaxedStore
    if mode.staleness is None:
        store = AsyncStore(shard, buckets, nranks, epoch=EPOCH, make_updater=make_updater)
    else:
        store = SspStore(shard, buckets, nranks, staleness=mode.staleness, epoch=EPOCH, make_updater=make_updater)
    store.parameters[...] = initial_parameters(length)[shard.start : shard.stop]
    store.begin(None)
    return store


def numpy_updater(store: RelaxedStore, _: Optimizer | None) -> Updater:
    return NumpySGD(store)


def released_by(progress: Progress) -> list[int]:
    """The trainers that may go on."""
    assert progress.finished
    return [rank for result in progress.results for rank in result.ranks]


def moved(mode: Mode, parameters: FloatArray, words: FloatArray, rate: float, nranks: int, plan: list[Bucket]) -> None:
    """The whole model after one trainer's step on arrival."""
    for b in plan:
        to, by = (array[b.start : b.stop].view(b.dtype) for array in (parameters, words))
        number = np.dtype(b.dtype).type
        to += by * number(1 / nranks) if mode.name == "geo" else -(number(rate) * by)


def state_of(store: RelaxedStore) -> dict[str, Any]:
    found = dict(vars(store))
    found.pop("_window" if "_window" in found else "_states")
    return {**found, "_made": [everything_in(each) for each in store._made]}


@contextmanager
def refused(store: RelaxedStore, kind: type[GradSyncError], text: str | None = None) -> Iterator[None]:
    before = pickle.dumps(state_of(store))
    with pytest.raises(kind, match=text) as caught:
        yield
    assert type(caught.value) is kind
    assert pickle.dumps(state_of(store)) == before


class RelaxedMachine(RuleBasedStateMachine):
    """Trainers of several servers push and commit as they like, each at its own pace, until they have to wait; some
    have their gradients read in place and write over them as soon as they may."""

    @initialize(
        mode=st.sampled_from([*(Mode("ssp", s) for s in range(4)), ASYNC, GEO]),
        plan=st.one_of(plans(), mixed_plans()),
        nranks=st.integers(1, 4),
        servers=st.integers(1, 3),
        in_place=st.sets(st.integers(0, 3)),
    )
    def begin(self, mode: Mode, plan: tuple[int, list[Bucket]], nranks: int, servers: int, in_place: set[int]) -> None:
        self.mode, self.nranks = mode, nranks
        self.length, self.buckets = plan
        shards = plan_shards(self.length, servers)
        self.stores = [make(mode, shard, self.buckets, nranks, self.length) for shard in shards]
        self.steps = [[0] * nranks for _ in shards]
        self.waiting: list[set[int]] = [set() for _ in shards]
        self.sent = [self.nothing_sent() for _ in range(servers * nranks)]
        self.memory = {r: [np.full(shard.length, np.nan, np.float32) for shard in shards] for r in in_place}
        for rank in in_place & set(range(nranks)):
            for store, memory in zip(self.stores, self.memory[rank], strict=True):
                store.read_in_place(rank, memory)
        self.arrived = [initial_parameters(self.length) for _ in shards]  # async and geo: the whole model by server
        self.applied = [0 for _ in shards]
        self.models = [initial_parameters(self.length)]  # ssp: after so many steps

    def nothing_sent(self) -> list[int]:
        return [0] * len(self.buckets)

    def rate(self, rank: int, step: int) -> float:
        return rate_of(step if self.mode.staleness is not None else 10 * rank + step)  # of its own, in async

    def words(self, rank: int, step: int) -> FloatArray:
        return gradients_of(rank, step, self.length, tuple(self.buckets))

    def sent_by(self, server: int, rank: int) -> list[int]:
        return self.sent[server * self.nranks + rank]

    def going(self) -> list[tuple[int, int]]:
        pairs = [(s, r) for s in range(len(self.stores)) for r in range(self.nranks)]
        return [(s, r) for s, r in pairs if r not in self.waiting[s]]

    def left(self, server: int, rank: int) -> list[int]:
        parts = [shard_of_bucket(self.stores[server].shard, b).length for b in self.buckets]
        sent = self.sent_by(server, rank)
        return [b for b in range(len(self.buckets)) if sent[b] < parts[b]]

    def push(self, server: int, rank: int, bucket: int, size: int) -> None:
        store, step = self.stores[server], self.steps[server][rank]
        part, sent = shard_of_bucket(store.shard, self.buckets[bucket]), self.sent_by(server, rank)
        start = part.start + sent[bucket]
        size = min(size + size % words(self.buckets[bucket].dtype), part.stop - start)
        data: FloatArray | int = self.words(rank, step)[start : start + size]
        if rank in self.memory:
            self.memory[rank][server][start - store.shard.start :][:size] = data
            data = size
        store.push(rank, EPOCH, step, bucket, start, data)
        sent[bucket] += size

    @precondition(lambda self: any(self.left(s, r) for s, r in self.going()))
    @rule(data=st.data(), size=st.integers(1, 40))
    def push_some(self, data: st.DataObject, size: int) -> None:
        server, rank = data.draw(st.sampled_from([(s, r) for s, r in self.going() if self.left(s, r)]))
        self.push(server, rank, data.draw(st.sampled_from(self.left(server, rank))), size)

    @precondition(lambda self: self.going())
    @rule(data=st.data())
    def take_the_whole_step(self, data: st.DataObject) -> None:
        server, rank = data.draw(st.sampled_from(self.going()))
        for bucket in self.left(server, rank):
            self.push(server, rank, bucket, self.length)
        store, step, nranks = self.stores[server], self.steps[server][rank], self.nranks
        ending = Ending(self.rate(rank, step))
        released = released_by(store.commit(rank, EPOCH, step, ending, b""))
        self.steps[server][rank] += 1
        self.waiting[server].add(rank)
        self.sent[server * nranks + rank] = self.nothing_sent()
        if self.mode.staleness is None:
            moved(self.mode, self.arrived[server], self.words(rank, step), ending.learning_rate, nranks, self.buckets)
            self.applied[server] += 1
            expected = [rank]
        else:
            self.applied[server] = min(self.steps[server])
            bound = self.applied[server] + self.mode.staleness
            expected = [r for r in sorted(self.waiting[server]) if self.steps[server][r] <= bound]
        assert released == expected
        self.waiting[server] -= set(released)
        for each in set(released) & self.memory.keys():
            self.memory[each][server][...] = np.nan  # its own again

    @precondition(lambda self: self.going() and self.buckets)
    @rule(data=st.data())
    def a_wrong_message_changes_nothing(self, data: st.DataObject) -> None:
        server, rank = data.draw(st.sampled_from(self.going()))
        store, step = self.stores[server], self.steps[server][rank]
        one: FloatArray | int = 1 if rank in self.memory else np.ones(1, np.float32)
        other = np.ones(1, np.float32) if rank in self.memory else 1
        bucket, wrong = data.draw(st.integers(0, len(self.buckets) - 1)), step + data.draw(st.sampled_from([-1, 1, 2]))
        at = shard_of_bucket(store.shard, self.buckets[bucket]).start + self.sent_by(server, rank)[bucket]
        at += data.draw(st.sampled_from([-1, 1]))
        start = store.shard.start

        def commit(epoch: int, step: int) -> object:
            return store.commit(rank, epoch, step, Ending(0.1), b"")

        acts: list[tuple[type[GradSyncError], str, Callable[[], object]]] = [
            (ProtocolError, f"sent step {wrong}, it is at", lambda: store.push(rank, EPOCH, wrong, bucket, at, one)),
            (ProtocolError, f"sent step {wrong}, it is at", lambda: commit(EPOCH, wrong)),
            (StaleEpoch, "", lambda: store.push(rank, EPOCH - 1, step, bucket, at, one)),
            (StaleEpoch, "", lambda: commit(EPOCH - 1, step)),
            (StaleEpoch, "", lambda: store.pull(rank, EPOCH + 1, step)),
            (ProtocolError, "pushed bucket", lambda: store.push(rank, EPOCH, step, len(self.buckets), start, one)),
            (ProtocolError, "not expected", lambda: store.push(rank, EPOCH, step, bucket, at, other)),
            (ProtocolError, f"pushed words {at}", lambda: store.push(rank, EPOCH, step, bucket, at, one)),
        ]
        if self.left(server, rank):
            acts.append((ProtocolError, f"committed step {step} after", lambda: commit(EPOCH, step)))
        kind, text, act = data.draw(st.sampled_from(acts))
        with refused(store, kind, f"rank {rank} .*{text}"):
            act()

    @precondition(lambda self: any(self.waiting))
    @rule(data=st.data())
    def who_waits_is_not_heard(self, data: st.DataObject) -> None:
        server = data.draw(st.sampled_from([s for s, waiting in enumerate(self.waiting) if waiting]))
        rank = data.draw(st.sampled_from(sorted(self.waiting[server])))
        store, step = self.stores[server], self.steps[server][rank]
        late = [r for r in range(self.nranks) if self.steps[server][r] == min(self.steps[server])]
        assert store.waiting_for() == late
        one: FloatArray | int = 1 if rank in self.memory else np.ones(1, np.float32)
        text = f"rank {rank} sent more before its commit of step {step - 1} was answered"
        acts: list[Callable[[], object]] = [
            lambda: store.push(rank, EPOCH, step, 0, store.shard.start, one),
            lambda: store.commit(rank, EPOCH, step, Ending(0.1), b""),
            lambda: store.pull(rank, EPOCH, step),
        ]
        with refused(store, ProtocolError, text):
            data.draw(st.sampled_from(acts))()

    @invariant()
    def every_update_is_there_once(self) -> None:
        for index, store in enumerate(getattr(self, "stores", [])):
            if self.mode.staleness is None:
                whole = self.arrived[index]
            else:
                while len(self.models) <= self.applied[index]:
                    step = len(self.models) - 1
                    self.models.append(updated(self.models[-1], step, rate_of(step), self.nranks, self.buckets))
                whole = self.models[self.applied[index]]
            assert store.parameters.tobytes() == whole[store.shard.start : store.shard.stop].tobytes()
            assert store.updates == self.applied[index]
            assert store.steps == self.steps[index]
            assert store.waiting() == self.waiting[index]

    @invariant()
    def nobody_is_further_ahead_than_the_bound(self) -> None:
        for store in getattr(self, "stores", []):
            if self.mode.staleness is not None:
                going = [store.steps[r] for r in range(self.nranks) if r not in store.waiting()]
                assert max(going) - min(store.steps) <= self.mode.staleness
                assert len(store._window) == self.mode.staleness + 1  # type: ignore[attr-defined]


TestRelaxedStores = RelaxedMachine.TestCase
TestRelaxedStores.settings = settings(max_examples=examples(20, 300), stateful_step_count=40)


# ---- one by one -------------------------------------------------------------------------------------------------


def step_of(store: RelaxedStore, rank: int, *, rate: float | None = None) -> Sequence[int]:
    step = store.steps[rank]
    for bucket, where in enumerate(PLAN):
        part = shard_of_bucket(store.shard, where)
        if part.length:
            words = gradients_of(rank, step, LENGTH)[part.start : part.stop]
            store.push(rank, EPOCH, step, bucket, part.start, words)
    ending = Ending(rate_of(step) if rate is None else rate)
    return released_by(store.commit(rank, EPOCH, step, ending, b""))


def test_a_trainer_waits_as_soon_as_it_would_be_too_far_ahead() -> None:
    store = make(Mode("ssp", 2), Shard(0, LENGTH), PLAN, 3, LENGTH)
    assert [list(step_of(store, 0)) for _ in range(3)] == [[0], [0], []]  # steps 0, 1, 2; 3 must not begin
    assert store.waiting_for() == [1, 2]
    assert step_of(store, 1) == [1]
    assert store.waiting_for() == [2]
    assert step_of(store, 2) == [0, 2]
    assert (store.updates, store.waiting(), store.waiting_for()) == (1, set(), [])


def test_a_bound_of_zero_is_sync_bit_for_bit() -> None:
    store = make(Mode("ssp", 0), Shard(0, LENGTH), PLAN, 3, LENGTH)
    for _ in range(4):
        assert [list(step_of(store, rank)) for rank in (2, 0, 1)] == [[], [], [0, 1, 2]]
    assert store.parameters.tobytes() == parameters_after(4, 3, PLAN, LENGTH).tobytes()


def test_steps_are_applied_in_order_however_far_one_is_ahead() -> None:
    store = make(Mode("ssp", 3), Shard(0, LENGTH), PLAN, 2, LENGTH)
    for _ in range(4):
        step_of(store, 1)
    assert store.parameters.tobytes() == initial_parameters(LENGTH).tobytes()
    for done in range(1, 5):
        step_of(store, 0)
        assert store.parameters.tobytes() == parameters_after(done, 2, PLAN, LENGTH).tobytes()


def test_learning_rates_must_agree_under_ssp_and_need_not_under_async() -> None:
    store = make(SSP, Shard(0, LENGTH), PLAN, 2, LENGTH)
    step_of(store, 0, rate=0.1)
    with pytest.raises(LayoutMismatch, match=r"rank 1 has learning rate 0\.2 at step 0, rank 0 has 0\.1"):
        step_of(store, 1, rate=0.2)
    store = make(ASYNC, Shard(0, LENGTH), PLAN, 2, LENGTH)
    expected = initial_parameters(LENGTH)
    for rank, rate in ((1, 0.2), (0, 0.1), (1, 0.3)):
        words = gradients_of(rank, store.steps[rank], LENGTH)
        assert step_of(store, rank, rate=rate) == [rank]
        expected -= np.float32(rate) * words
    assert store.parameters.tobytes() == expected.tobytes()


def test_differences_are_added_in_part() -> None:
    """Two trainers that both moved by d move the server by d."""
    store = make(GEO, Shard(0, LENGTH), PLAN, 2, LENGTH)
    for rank in (0, 1):
        for bucket, b in enumerate(PLAN):
            store.push(rank, EPOCH, 0, bucket, b.start, np.full(b.length, 0.5, np.float32))
        store.commit(rank, EPOCH, 0, Ending(0.1), b"")
    np.testing.assert_array_equal(store.parameters, initial_parameters(LENGTH) + np.float32(0.25) + np.float32(0.25))


@pytest.mark.parametrize("mode", [SSP, ASYNC, GEO], ids=str)
@pytest.mark.parametrize("ending", [Ending(0.0, update=False), Ending(0.1, again=True), Ending(0.1, replaced=True)])
def test_only_updates_are_to_be_had(mode: Mode, ending: Ending) -> None:
    store = make(mode, Shard(LENGTH, LENGTH), PLAN, 1, LENGTH)
    text = "^rank 0 asked for more than an update at step 0, which only sync mode has$"
    with refused(store, ProtocolError, text):
        store.commit(0, EPOCH, 0, ending, b"")


@pytest.mark.parametrize("mode", [SSP, ASYNC, GEO], ids=str)
def test_a_server_without_a_slice_keeps_the_pace(mode: Mode) -> None:
    store = make(mode, Shard(LENGTH, LENGTH), PLAN, 2, LENGTH)
    assert [list(step_of(store, rank)) for rank in (0, 0)] == [[0], [0] if mode != SSP else []]


def test_who_has_left_is_missed_when_others_are_ahead_of_it() -> None:
    ssp, free = (make(mode, Shard(0, LENGTH), PLAN, 2, LENGTH) for mode in (SSP, ASYNC))
    for store in (ssp, free):
        assert not store.misses({0})
        step_of(store, 1)
        assert not store.misses({1})
    assert ssp.misses({0})
    assert not free.misses({0})


def test_the_model_tells_a_lost_and_a_doubled_update_apart() -> None:
    """A test of these tests: each of two updates shows."""
    zero, one, two = (parameters_after(steps, 2, PLAN, LENGTH) for steps in range(3))
    assert len({zero.tobytes(), one.tobytes(), two.tobytes()}) == 3
