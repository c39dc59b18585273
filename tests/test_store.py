"""The store against a model of plain NumPy: whatever the order of messages, whatever illegal ones come between."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.arena import FloatArray
from common.buckets import Bucket
from common.errors import GradSyncError, LayoutMismatch, ProtocolError, StaleEpoch
from ps.shards import Shard, plan_shards, shard_of_bucket
from ps.store import Ending, Store

EPOCH = 3


class NumpySGD:
    """The smallest updater: p -= lr * g."""

    def __init__(self, store: Store) -> None:
        self.parameters, self.gradients = store.parameters, store.gradients  # kept by reference, as Paddle's do

    def step(self, learning_rate: float, used: bytes = b"") -> None:
        self.parameters -= np.float32(learning_rate) * self.gradients


def rate_of(step: int) -> float:
    return 0.1 / (1 + step)


@functools.cache
def gradients_of(rank: int, step: int, length: int) -> FloatArray:
    """Of mixed magnitudes, so that another order of summation gives other bits."""
    random = np.random.default_rng([rank, step, length])
    return (random.standard_normal(length) * 10.0 ** random.integers(-3, 4, length)).astype(np.float32)


def initial_parameters(length: int) -> FloatArray:
    return np.random.default_rng(length).standard_normal(length).astype(np.float32)


def canonical_mean(sources: list[FloatArray], bucket: Bucket) -> FloatArray:
    """Float32 mean of a bucket: 16-element units dealt to N chunks, chunk c summed from rank c+1 round to c."""
    nranks, units = len(sources), -(-bucket.length // 16)
    chunk = np.arange(bucket.length) // 16 * nranks // max(units, 1)
    mean = np.zeros(bucket.length, np.float32)
    for c in range(nranks):
        total = sources[(c + 1) % nranks][bucket.start : bucket.stop].copy()
        for i in range(2, nranks + 1):
            total = total + sources[(c + i) % nranks][bucket.start : bucket.stop]
        mean[chunk == c] = (total * np.float32(1.0 / nranks))[chunk == c]
    return mean


def parameters_after(steps: int, nranks: int, buckets: list[Bucket], length: int) -> FloatArray:
    parameters = initial_parameters(length)
    for step in range(steps):
        sources = [gradients_of(rank, step, length) for rank in range(nranks)]
        for b in buckets:
            parameters[b.start : b.stop] -= np.float32(rate_of(step)) * canonical_mean(sources, b)
    return parameters


def make_store(shard: Shard, buckets: list[Bucket], nranks: int, length: int) -> Store:
    store = Store(shard, buckets, nranks, epoch=EPOCH)
    store.parameters[...] = initial_parameters(length)[shard.start : shard.stop]
    return store


@contextmanager
def refused(store: Store, kind: type[GradSyncError], text: str | None = None) -> Iterator[None]:
    """The block raises exactly `kind`, and leaves the store as it was."""
    before = copy.deepcopy(vars(store))
    with pytest.raises(kind, match=text) as caught:
        yield
    assert type(caught.value) is kind
    np.testing.assert_equal(vars(store), before)


def deliver(store: Store, rank: int, bucket: int, length: int, *, piece: int = 10**9) -> None:
    """Push the rest of a bucket in pieces, and reduce it if it was the last."""
    part = shard_of_bucket(store.shard, store._buckets[bucket])
    gradients = gradients_of(rank, store.step, length)
    for start in range(part.start + store._delivered[rank][bucket], part.stop, piece):
        data = gradients[start : min(start + piece, part.stop)]
        if store.push(rank, EPOCH, store.step, bucket, start, data):
            store.reduce(bucket)


def play_step(store: Store, length: int, *, piece: int = 10**9) -> None:
    for rank in range(store.nranks):
        for bucket in range(len(store._buckets)):
            deliver(store, rank, bucket, length, piece=piece)
    step = store.step
    for rank in range(store.nranks):
        if store.commit(rank, EPOCH, step, Ending(rate_of(step))):
            store.update(NumpySGD(store))


# ---- unit tests -------------------------------------------------------------------------------------------------

PLAN = [Bucket(48, 70), Bucket(16, 48), Bucket(0, 16)]
LENGTH = 70


@pytest.mark.parametrize("nranks", [1, 2, 3, 4])
@pytest.mark.parametrize("servers", [1, 2, 3, 5, 9])
def test_all_shards_together_are_the_unsharded_result(nranks: int, servers: int) -> None:
    stores = [make_store(shard, PLAN, nranks, LENGTH) for shard in plan_shards(LENGTH, servers)]
    for _ in range(3):
        for store in stores:
            play_step(store, LENGTH, piece=7)
    together = np.concatenate([store.parameters for store in stores])
    assert together.tobytes() == parameters_after(3, nranks, PLAN, LENGTH).tobytes()


def test_the_model_of_these_tests_tells_orders_apart() -> None:
    sources = [gradients_of(rank, 0, 480) for rank in range(4)]
    canonical = canonical_mean(sources, Bucket(0, 480))
    in_rank_order = (sources[0] + sources[1] + sources[2] + sources[3]) * np.float32(0.25)
    assert (canonical != in_rank_order).any()
    np.testing.assert_allclose(canonical, np.mean(sources, axis=0, dtype=np.float64), rtol=1e-3, atol=1e-3)


def test_nothing_changes_before_the_last_commit() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    for rank in (1, 0):
        for bucket in (2, 0, 1):
            deliver(store, rank, bucket, LENGTH)
    assert store.commit(0, EPOCH, 0, Ending(0.1)) is False
    assert store.waiting_for() == [1]
    assert store.step == 0
    assert store.parameters.tobytes() == initial_parameters(LENGTH).tobytes()
    assert store.commit(1, EPOCH, 0, Ending(0.1)) is True
    store.update(NumpySGD(store))
    assert (store.step, store.waiting_for()) == (1, [0, 1])


def test_a_server_without_a_slice_takes_part_without_pushes() -> None:
    store = make_store(Shard(LENGTH, LENGTH), PLAN, 2, LENGTH)
    for step in range(2):
        assert store.commit(1, EPOCH, step, Ending(0.1)) is False
        assert store.commit(0, EPOCH, step, Ending(0.1)) is True
        store.update(NumpySGD(store))
    assert store.step == 2


def test_an_empty_part_and_an_empty_piece_are_no_delivery() -> None:
    store = make_store(Shard(16, 48), PLAN, 1, LENGTH)
    nothing = np.empty(0, np.float32)
    assert store.push(0, EPOCH, 0, 1, 16, nothing) is False
    assert store.push(0, EPOCH, 0, 0, 48, nothing) is False
    assert store.push(0, EPOCH, 0, 1, 16, gradients_of(0, 0, LENGTH)[16:48]) is True


def test_the_last_piece_of_the_last_trainer_completes_a_bucket() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    g = gradients_of(0, 0, LENGTH)
    assert store.push(0, EPOCH, 0, 2, 0, g[:16]) is False
    assert store.push(1, EPOCH, 0, 2, 0, g[:9]) is False
    assert store.push(1, EPOCH, 0, 2, 9, g[9:16]) is True


def test_memory_is_one_buffer_a_trainer() -> None:
    store = make_store(Shard(16, 48), PLAN, 3, LENGTH)
    assert [c.size for c in store._contributions] == [32, 32, 32]
    assert store.gradients is store._contributions[0]


one = np.ones(1, np.float32)
ILLEGAL: dict[str, tuple[type[GradSyncError], str, Callable[[Store], object]]] = {
    "push of an old epoch": (StaleEpoch, "epoch 2.* epoch 3", lambda s: s.push(0, 2, 0, 0, 48, one)),
    "commit of an old epoch": (StaleEpoch, "epoch 2.* epoch 3", lambda s: s.commit(0, 2, 0, Ending(0.1))),
    "push of a later step": (ProtocolError, "step 1.*step 0", lambda s: s.push(0, EPOCH, 1, 0, 48, one)),
    "commit of a later step": (ProtocolError, "step 1.*step 0", lambda s: s.commit(0, EPOCH, 1, Ending(0.1))),
    "bucket that is not": (ProtocolError, "bucket 3 of 3", lambda s: s.push(0, EPOCH, 0, 3, 0, one)),
    "gap": (ProtocolError, "49..50 of bucket 0.*from 48", lambda s: s.push(0, EPOCH, 0, 0, 49, one)),
    "element of the bucket before": (ProtocolError, "47..48", lambda s: s.push(0, EPOCH, 0, 0, 47, one)),
    "beyond the bucket": (ProtocolError, "up to 70", lambda s: s.push(0, EPOCH, 0, 0, 48, np.ones(23, np.float32))),
    "commit without pushes": (ProtocolError, "after 0 of 70", lambda s: s.commit(0, EPOCH, 0, Ending(0.1))),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_cannot_be_right_is_refused(name: str) -> None:
    kind, text, act = ILLEGAL[name]
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    with refused(store, kind, f"rank 0 .*{text}"):
        act(store)


def test_an_element_twice_is_refused() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    store.push(1, EPOCH, 0, 0, 48, one)
    with refused(store, ProtocolError, "rank 1 pushed words 48..49.*expected them from 49"):
        store.push(1, EPOCH, 0, 0, 48, one)


def test_a_whole_bucket_twice_is_refused() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 1, LENGTH)
    deliver(store, 0, 2, LENGTH)
    with refused(store, ProtocolError):
        store.push(0, EPOCH, 0, 2, 0, gradients_of(0, 0, LENGTH)[:16])


def test_a_push_outside_the_shard_is_refused() -> None:
    store = make_store(Shard(16, 48), PLAN, 1, LENGTH)
    with refused(store, ProtocolError):
        store.push(0, EPOCH, 0, 2, 0, one)
    with refused(store, ProtocolError):
        store.push(0, EPOCH, 0, 1, 16, np.ones(33, np.float32))


def test_a_commit_with_one_element_missing_is_refused() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 1, LENGTH)
    deliver(store, 0, 0, LENGTH)
    deliver(store, 0, 1, LENGTH)
    store.push(0, EPOCH, 0, 2, 0, np.ones(15, np.float32))
    with refused(store, ProtocolError, "rank 0 committed step 0 after 69 of 70 words"):
        store.commit(0, EPOCH, 0, Ending(0.1))


def committed_by_rank_0() -> Store:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    for rank in (0, 1):
        for bucket in range(3):
            deliver(store, rank, bucket, LENGTH)
    store.commit(0, EPOCH, 0, Ending(0.1))
    return store


def test_anything_after_a_commit_is_refused() -> None:
    store = committed_by_rank_0()
    with refused(store, ProtocolError, "rank 0 sent more after committing step 0"):
        store.push(0, EPOCH, 0, 0, 70, np.empty(0, np.float32))
    with refused(store, ProtocolError, "rank 0 sent more after committing step 0"):
        store.commit(0, EPOCH, 0, Ending(0.1))


def test_another_learning_rate_is_refused_naming_both() -> None:
    store = committed_by_rank_0()
    with refused(store, LayoutMismatch, r"rank 1 has learning rate 0\.2 at step 0, rank 0 has 0\.1"):
        store.commit(1, EPOCH, 0, Ending(0.2))


def test_the_step_before_is_refused_after_an_update() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 1, LENGTH)
    play_step(store, LENGTH)
    with refused(store, ProtocolError, "rank 0 sent step 0, this is step 1"):
        store.commit(0, EPOCH, 0, Ending(0.1))
    with refused(store, ProtocolError, "rank 0 sent step 0, this is step 1"):
        store.push(0, EPOCH, 0, 2, 0, one)


# ---- any order, any pieces, any sizes ---------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, list[Bucket]]:
    """An arena's length and its bucket plan, from the end to the start; cuts lie anywhere."""
    length = draw(st.integers(0, 130))
    edges = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=4))})
    return length, [Bucket(a, b) for a, b in pairwise(edges)][::-1]


@settings(max_examples=40, deadline=None)
@given(plans(), st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False), st.integers(1, 60))
def test_arrival_order_and_piece_sizes_never_matter(
    plan: tuple[int, list[Bucket]], nranks: int, servers: int, random: Random, piece: int
) -> None:
    length, buckets = plan
    stores = [make_store(shard, buckets, nranks, length) for shard in plan_shards(length, servers)]
    work = [(s, r, b) for s in range(servers) for r in range(nranks) for b in range(len(buckets))]
    random.shuffle(work)
    for server, rank, bucket in work:
        deliver(stores[server], rank, bucket, length, piece=piece)
    ranks = list(range(nranks))
    random.shuffle(ranks)
    for store in stores:
        assert [store.commit(rank, EPOCH, 0, Ending(rate_of(0))) for rank in ranks] == [False] * (nranks - 1) + [True]
        store.update(NumpySGD(store))
    together = np.concatenate([store.parameters for store in stores])
    assert together.tobytes() == parameters_after(1, nranks, buckets, length).tobytes()


class StoreMachine(RuleBasedStateMachine):
    """Trainers of several servers push and commit as they like; each server is compared with the whole model."""

    @initialize(plan=plans(), nranks=st.integers(1, 4), servers=st.integers(1, 4))
    def begin(self, plan: tuple[int, list[Bucket]], nranks: int, servers: int) -> None:
        self.length, self.buckets = plan
        self.nranks = nranks
        self.stores = [make_store(s, self.buckets, nranks, self.length) for s in plan_shards(self.length, servers)]
        self.models = [initial_parameters(self.length)]
        self.begin_steps()

    def begin_steps(self) -> None:
        self.sent = [self.nothing_sent() for _ in self.stores]
        self.committed: list[set[int]] = [set() for _ in self.stores]

    def nothing_sent(self) -> list[list[int]]:
        return [[0] * len(self.buckets) for _ in range(self.nranks)]

    def part(self, server: int, bucket: int) -> Shard:
        return shard_of_bucket(self.stores[server].shard, self.buckets[bucket])

    def left(self, server: int, rank: int, bucket: int) -> int:
        return self.part(server, bucket).length - self.sent[server][rank][bucket]

    def open_ranks(self) -> list[tuple[int, int]]:
        pairs = [(s, r) for s in range(len(self.stores)) for r in range(self.nranks)]
        return [(s, r) for s, r in pairs if r not in self.committed[s]]

    def pending(self) -> list[tuple[int, int, int]]:
        triples = [(s, r, b) for s, r in self.open_ranks() for b in range(len(self.buckets))]
        return [triple for triple in triples if self.left(*triple)]

    def ready(self) -> list[tuple[int, int]]:
        waiting = {(s, r) for s, r, _ in self.pending()}
        return [pair for pair in self.open_ranks() if pair not in waiting]

    def push(self, server: int, rank: int, bucket: int, size: int) -> None:
        store, sent = self.stores[server], self.sent[server]
        start = self.part(server, bucket).start + sent[rank][bucket]
        data = gradients_of(rank, store.step, self.length)[start : start + size]
        complete = store.push(rank, EPOCH, store.step, bucket, start, data)
        sent[rank][bucket] += size
        assert complete == (size > 0 and not any(self.left(server, r, bucket) for r in range(self.nranks)))
        if complete:
            store.reduce(bucket)

    def commit(self, server: int, rank: int) -> None:
        store = self.stores[server]
        complete = store.commit(rank, EPOCH, store.step, Ending(rate_of(store.step)))
        self.committed[server].add(rank)
        assert complete == (len(self.committed[server]) == self.nranks)
        if complete:
            store.update(NumpySGD(store))
            self.sent[server], self.committed[server] = self.nothing_sent(), set()

    def model(self, step: int) -> FloatArray:
        while len(self.models) <= step:
            self.models.append(parameters_after(len(self.models), self.nranks, self.buckets, self.length))
        return self.models[step]

    @precondition(lambda self: self.pending())
    @rule(data=st.data())
    def push_a_piece(self, data: st.DataObject) -> None:
        server, rank, bucket = data.draw(st.sampled_from(self.pending()))
        self.push(server, rank, bucket, data.draw(st.integers(0, self.left(server, rank, bucket))))

    @precondition(lambda self: self.open_ranks())
    @rule(data=st.data())
    def push_the_rest_and_commit(self, data: st.DataObject) -> None:
        server, rank = data.draw(st.sampled_from(self.open_ranks()))
        for bucket in data.draw(st.permutations(range(len(self.buckets)))):
            self.push(server, rank, bucket, self.left(server, rank, bucket))
        self.commit(server, rank)

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def commit_when_ready(self, data: st.DataObject) -> None:
        self.commit(*data.draw(st.sampled_from(self.ready())))

    @rule(data=st.data(), epoch=st.sampled_from([0, EPOCH - 1, EPOCH + 1]))
    def another_epoch(self, data: st.DataObject, epoch: int) -> None:
        store, rank = data.draw(st.sampled_from(self.stores)), data.draw(st.integers(0, self.nranks - 1))
        with refused(store, StaleEpoch):
            store.push(rank, epoch, store.step, 0, store.shard.start, one)
        with refused(store, StaleEpoch):
            store.commit(rank, epoch, store.step, Ending(rate_of(store.step)))

    @rule(data=st.data(), offset=st.sampled_from([-1, 1, 7]))
    def another_step(self, data: st.DataObject, offset: int) -> None:
        store, rank = data.draw(st.sampled_from(self.stores)), data.draw(st.integers(0, self.nranks - 1))
        with refused(store, ProtocolError):
            store.push(rank, EPOCH, store.step + offset, 0, store.shard.start, one)
        with refused(store, ProtocolError):
            store.commit(rank, EPOCH, store.step + offset, Ending(rate_of(store.step)))

    @precondition(lambda self: self.pending())
    @rule(data=st.data())
    def wrong_elements(self, data: st.DataObject) -> None:
        server, rank, bucket = data.draw(st.sampled_from(self.pending()))
        store, part = self.stores[server], self.part(server, bucket)
        at = part.start + self.sent[server][rank][bucket]
        beyond = np.ones(part.stop - at + 1, np.float32)
        with refused(store, ProtocolError):
            store.push(rank, EPOCH, store.step, bucket, at, beyond)
        with refused(store, ProtocolError):
            store.push(rank, EPOCH, store.step, bucket, at + 1, one)
        with refused(store, ProtocolError):
            store.push(rank, EPOCH, store.step, bucket, at - 1, one)
        with refused(store, ProtocolError):
            store.push(rank, EPOCH, store.step, len(self.buckets), at, one)

    @precondition(lambda self: self.pending())
    @rule(data=st.data())
    def commit_with_pushes_missing(self, data: st.DataObject) -> None:
        server, rank, _ = data.draw(st.sampled_from(self.pending()))
        store = self.stores[server]
        with refused(store, ProtocolError):
            store.commit(rank, EPOCH, store.step, Ending(rate_of(store.step)))

    @precondition(lambda self: any(self.committed))
    @rule(data=st.data())
    def more_after_a_commit(self, data: st.DataObject) -> None:
        server = data.draw(st.sampled_from([s for s, ranks in enumerate(self.committed) if ranks]))
        rank, store = data.draw(st.sampled_from(sorted(self.committed[server]))), self.stores[server]
        with refused(store, ProtocolError):
            store.push(rank, EPOCH, store.step, 0, store.shard.start, one)
        with refused(store, ProtocolError):
            store.commit(rank, EPOCH, store.step, Ending(rate_of(store.step)))

    @precondition(lambda self: any(self.committed[server] for server, _ in self.ready()))
    @rule(data=st.data())
    def another_learning_rate(self, data: st.DataObject) -> None:
        pairs = [(server, rank) for server, rank in self.ready() if self.committed[server]]
        server, rank = data.draw(st.sampled_from(pairs))
        store = self.stores[server]
        with refused(store, LayoutMismatch):
            store.commit(rank, EPOCH, store.step, Ending(2 * rate_of(store.step)))

    @invariant()
    def every_server_has_its_slice_of_the_model(self) -> None:
        for server, store in enumerate(getattr(self, "stores", [])):
            expected = self.model(store.step)[store.shard.start : store.shard.stop]
            assert store.parameters.tobytes() == expected.tobytes()
            assert store.waiting_for() == [r for r in range(self.nranks) if r not in self.committed[server]]


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
