"""What every store promises, whatever the consistency mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from common.errors import ProtocolError, StaleEpoch
from common.tensors.arena import FloatArray
from common.tensors.buckets import Bucket
from common.tensors.optimizers import SGD
from ps.store.ending import Ending
from ps.store.make import make_store
from ps.store.modes import ASYNC, SYNC, Mode
from ps.store.shards import Shard
from ps.store.store import Result, Store
from tests.support.numpy_optimizer import instead_of_paddle

MODES = [SYNC, Mode("ssp", 0), Mode("ssp", 2), ASYNC, Mode("geo", 3)]
SHARD, BUCKETS, NRANKS, EPOCH = Shard(16, 48), [Bucket(32, 64), Bucket(0, 32)], 2, 5
everywhere = pytest.mark.parametrize("mode", MODES, ids=str)


@pytest.fixture(autouse=True)
def _without_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of_paddle(monkeypatch)


def begun(mode: Mode) -> tuple[Store, Sequence[Result]]:
    store = make_store(mode, SHARD, BUCKETS, NRANKS, epoch=EPOCH)
    store.parameters[...] = np.arange(SHARD.length)
    return store, store.begin(SGD())


def gradients(rank: int) -> FloatArray:
    """All equal, so that neither their order nor their number matters to the bits."""
    return np.full(64, 2.0, np.float32)


def push_all(store: Store, rank: int, step: int) -> Iterator[Result]:
    for bucket, start, stop in ((0, 32, 48), (1, 16, 32)):
        yield from store.push(rank, EPOCH, step, bucket, start, gradients(rank)[start:stop]).results


def step(store: Store, rank: int, number: int) -> list[Result]:
    """What comes of a whole step of one trainer."""
    results = list(push_all(store, rank, number))
    progress = store.commit(rank, EPOCH, number, Ending(0.5), b"")
    assert progress.finished
    return [*results, *progress.results]


def assembled(results: Sequence[Result], rank: int) -> FloatArray:
    """What a trainer that keeps nothing else has with them, complete at the end only."""
    mine = [result for result in results if rank in result.ranks]
    assert [result.complete for result in mine] == [False] * (len(mine) - 1) + [True]
    whole = np.full(64, np.nan, np.float32)
    for result in mine:
        whole[result.start : result.start + result.words.size] = result.words
    return whole[SHARD.start : SHARD.stop]


@everywhere
def test_the_first_result_is_rank_0s_parameters_for_all(mode: Mode) -> None:
    _, results = begun(mode)
    for rank in range(NRANKS):
        np.testing.assert_array_equal(assembled(results, rank), np.arange(SHARD.length))
    assert {result.step for result in results} == {0}


@everywhere
def test_when_all_have_made_a_step_all_have_its_result(mode: Mode) -> None:
    store, _ = begun(mode)
    results = [result for rank in range(NRANKS) for result in step(store, rank, 0)]
    for rank in range(NRANKS):
        assert {result.step for result in results if rank in result.ranks} == {1}
    change = {"async": -2.0, "geo": 2.0}.get(mode.name, -1.0)  # each by itself; by the mean of differences; once
    np.testing.assert_array_equal(store.parameters, np.arange(SHARD.length) + np.float32(change))
    np.testing.assert_array_equal(assembled(results, NRANKS - 1), store.parameters)
    assert (list(store.steps), store.waiting(), store.within_step()) == ([1, 1], set(), False)


@everywhere
def test_who_waits_and_for_whom(mode: Mode) -> None:
    store, _ = begun(mode)
    step(store, 0, 0)
    waits = mode in (SYNC, Mode("ssp", 0))
    assert store.waiting() == ({0} if waits else set())
    if waits:
        assert store.waiting_for() == [1]
    assert store.misses({1}) == (mode.staleness is not None)
    assert not store.misses(set())


@everywhere
def test_gradients_are_read_where_they_are(mode: Mode) -> None:
    stores = [begun(mode)[0] for _ in range(2)]
    for rank in range(NRANKS):
        stores[1].read_in_place(rank, gradients(rank)[SHARD.start : SHARD.stop])
        step(stores[0], rank, 0)
        for bucket, start in ((0, 32), (1, 16)):
            stores[1].push(rank, EPOCH, 0, bucket, start, 16)
        stores[1].commit(rank, EPOCH, 0, Ending(0.5), b"")
    np.testing.assert_array_equal(stores[0].parameters, stores[1].parameters)


@everywhere
def test_parameters_can_lie_in_memory_that_is_given(mode: Mode) -> None:
    store, memory = make_store(mode, SHARD, BUCKETS, NRANKS, epoch=EPOCH), np.zeros(SHARD.length, np.float32)
    store.keep_parameters_in(memory)
    assert store.parameters is memory
    store.begin(SGD())
    for rank in range(NRANKS):
        step(store, rank, 0)
    assert memory.any()


@everywhere
def test_what_does_not_fit_is_refused_and_changes_nothing(mode: Mode) -> None:
    store, _ = begun(mode)
    with pytest.raises(StaleEpoch):
        store.push(0, EPOCH - 1, 0, 0, 32, gradients(0)[32:48])
    with pytest.raises(ProtocolError):
        store.push(0, EPOCH, 1, 0, 32, gradients(0)[32:48])
    with pytest.raises(ProtocolError):
        store.commit(0, EPOCH, 0, Ending(0.5), b"")
    with pytest.raises(ProtocolError):
        store.pull(0, EPOCH, 1)
    for rank in range(NRANKS):
        step(store, rank, 0)
    assert list(store.steps) == [1, 1]


@everywhere
def test_only_sync_mode_can_be_told_the_optimizer_later(mode: Mode) -> None:
    store, _ = begun(mode)
    assert (store.program is not None) == (mode == SYNC)
