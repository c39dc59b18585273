"""A server in sync mode, message by message: who has finished, what is handed out and when, what is traced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.commit.slices import Slice
from common.errors import ProtocolError, UsageError
from common.sync.trace import Trace
from common.system.memory import aligned_empty
from common.tensors.arena import FloatArray, Layout
from common.tensors.buckets import Bucket
from common.tensors.optimizers import SGD, Momentum
from common.tensors.parts import Accumulator
from ps.store.ending import Ending
from ps.store.make import PIECE, SENT_PIECE, make_store
from ps.store.modes import SYNC
from ps.store.shards import Shard
from ps.store.store import Progress, Result
from ps.store.sync_store import SyncStore
from tests.support.groups import assert_same_bits
from tests.support.numpy_optimizer import instead_of_paddle
from tests.support.store_model import (
    EPOCH,
    LENGTH,
    PLAN,
    canonical_mean,
    gradients_of,
    initial_parameters,
    parameters_after,
    rate_of,
)
from tests.support.thorough import examples

SHARD = Shard(0, LENGTH)


class Spans(Trace):
    """The spans that were recorded, in the order in which they began."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    @contextmanager
    def span(self, name: str, bucket: int = -1, *, step: int = -1) -> Iterator[None]:
        self.seen.append((name, bucket, step))
        yield


@pytest.fixture(autouse=True)
def _without_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of_paddle(monkeypatch)


def begun(nranks: int, *, updates: bool, piece: int = 16) -> SyncStore:
    store = SyncStore(SHARD, PLAN, nranks, epoch=EPOCH, piece=piece)
    store.parameters[...] = initial_parameters(LENGTH)
    store.trace = Spans()
    (first,) = store.begin(SGD() if updates else None)
    assert_is(first, range(nranks), 0, 0, LENGTH)
    return store


def assert_is(result: Result, ranks: range, step: int, start: int, count: int, *, averages: bool = False) -> None:
    assert (result.ranks, result.step, result.start) == (ranks, step, start)
    assert (result.words.size, result.averages, result.lasting) == (count, averages, True)


def push(store: SyncStore, rank: int, bucket: int, start: int, stop: int, step: int = 0) -> Progress:
    return store.push(rank, EPOCH, step, bucket, start, gradients_of(rank, step, LENGTH)[start:stop])


def push_all(store: SyncStore, rank: int, step: int = 0) -> list[Progress]:
    return [push(store, rank, number, b.start, b.stop, step) for number, b in enumerate(PLAN)]


def spans(store: SyncStore) -> list[tuple[str, int, int]]:
    assert isinstance(store.trace, Spans)
    seen, store.trace.seen = store.trace.seen, []
    return seen


@settings(max_examples=examples(30, 300), deadline=None)
@given(st.integers(1, 3), st.sampled_from([16, 32, 1 << 62]), st.randoms(use_true_random=False))
def test_every_word_is_handed_out_once_as_soon_as_all_have_sent_and_committed_it(
    nranks: int, piece: int, random: Random
) -> None:
    """Trainers push pieces of buckets in any order, and commit at any moment; a commit before the rest is ahead."""
    store = begun(nranks, updates=True, piece=piece)
    for step in range(2):
        left = {rank: messages(random) for rank in range(nranks)}
        committed: set[int] = set()
        there = np.zeros((nranks, LENGTH), bool)
        handed_out = np.zeros(LENGTH, bool)
        now, ended = np.full(LENGTH, np.nan, np.float32), 0
        while left:
            rank = random.choice(sorted(left))
            bucket, start, stop = left[rank].pop(0)
            if bucket < 0:
                committed.add(rank)
                ahead = bool(left[rank])
                progress = store.commit(rank, EPOCH, step, Ending(rate_of(step)), b"", ahead=ahead)
            else:
                there[rank, start:stop] = True
                progress = push(store, rank, bucket, start, stop, step)
            if not left[rank]:
                del left[rank]
            assert progress.finished == (rank not in left)
            for result in progress.results:
                assert_is(result, range(nranks), step + 1, result.start, result.words.size)
                where = slice(result.start, result.start + result.words.size)
                assert not handed_out[where].any()
                handed_out[where], now[where] = True, result.words
                ended += result.complete
            due = there.all(0) & (len(committed) == nranks)
            assert (handed_out == whole_pieces(due, piece)).all()
            assert store.waiting() == (set() if not left else set(range(nranks)) - set(left))
            assert store.within_step() == (bool(committed) and bool(left))
        assert ended == 1
        assert_same_bits(now, parameters_after(step + 1, nranks, PLAN, LENGTH))
    assert list(store.steps) == [2] * nranks


def messages(random: Random) -> list[tuple[int, int, int]]:
    """(bucket, start, stop) of a trainer's pushes, each bucket's in ascending order, and its commit, (-1, 0, 0)."""
    cuts = [(b, i, sorted(random.sample(range(b.start + 1, b.stop), 2))) for i, b in enumerate(PLAN)]
    queues = [[(i, b.start, c[0]), (i, c[0], c[1]), (i, c[1], b.stop)] for b, i, c in cuts]
    found = []
    while any(queues):
        found.append(random.choice([queue for queue in queues if queue]).pop(0))
    found.insert(random.randint(0, len(found)), (-1, 0, 0))
    return found


def whole_pieces(due: np.ndarray, piece: int) -> np.ndarray:
    """What is due, but a piece only once all of it is; of each bucket in order."""
    found = np.zeros_like(due)
    for b in PLAN:
        for start in range(b.start, b.stop, min(piece, LENGTH)):
            stop = min(start + piece, b.stop)
            if not due[start:stop].all():
                break
            found[start:stop] = True
    return found


def test_a_complete_bucket_is_reduced_at_once_and_updated_at_the_end() -> None:
    store = begun(2, updates=True)
    assert not any(p.finished or p.results for rank in range(2) for p in push_all(store, rank))
    assert spans(store) == [("reduce", bucket, 0) for bucket in range(3)]
    assert store.commit(0, EPOCH, 0, Ending(0.1), b"") == Progress(finished=True)
    assert store.commit(1, EPOCH, 0, Ending(0.1), b"").results[-1].complete
    assert spans(store) == [("update", -1, 0)]


def test_what_all_have_committed_ahead_is_reduced_with_its_update() -> None:
    store = begun(2, updates=True)
    push_all(store, 0)
    for rank in range(2):
        store.commit(rank, EPOCH, 0, Ending(0.1), b"", ahead=rank == 1)
    assert spans(store) == []
    push(store, 1, 2, 0, 16)
    assert spans(store) == [("update", -1, 0), ("reduce", 2, 0)]
    one_ahead = begun(2, updates=True)
    one_ahead.commit(1, EPOCH, 0, Ending(0.1), b"", ahead=True)
    for rank in range(2):
        push(one_ahead, rank, 2, 0, 16)
    assert spans(one_ahead) == [("reduce", 2, 0)]


def test_without_an_optimizer_the_whole_is_handed_out_at_the_end() -> None:
    store = begun(2, updates=False)
    for rank in range(2):
        store.commit(rank, EPOCH, 0, Ending(0.1), b"", ahead=True)
    first = [p for rank in range(2) for p in push_all(store, rank)]
    assert [p.finished for p in first] == [False, False, True] * 2
    assert [len(p.results) for p in first] == [0] * 5 + [1]
    assert_is(first[-1].results[0], range(2), 1, 0, LENGTH)
    assert_same_bits(first[-1].results[0].words, initial_parameters(LENGTH))  # nobody has named an optimizer
    assert spans(store) == [*[("reduce", bucket, 0) for bucket in range(3)], ("update", -1, 0)]


def test_an_average_is_handed_out_as_such_and_can_be_used_again() -> None:
    store = begun(2, updates=True)
    for rank in range(2):
        push_all(store, rank)
    spans(store)
    store.commit(0, EPOCH, 0, Ending(0.0, update=False), b"")
    done = store.commit(1, EPOCH, 0, Ending(0.0, update=False), b"")
    assert done.finished
    assert spans(store) == []
    assert_is(done.results[0], range(2), 1, 0, LENGTH, averages=True)
    means = [canonical_mean([gradients_of(rank, 0, LENGTH) for rank in range(2)], bucket) for bucket in PLAN]
    assert_same_bits(done.results[0].words, np.concatenate(means[::-1]))
    for rank in range(2):
        again = store.commit(rank, EPOCH, 1, Ending(rate_of(0), again=True), b"")
    assert again.finished
    assert_same_bits(store.parameters, parameters_after(1, 2, PLAN, LENGTH))
    assert list(store.steps) == [1, 1]


def test_an_average_that_is_not_there_cannot_be_used_again() -> None:
    store = begun(1, updates=True)
    for step in range(2):  # none yet; used up by the update
        with pytest.raises(ProtocolError, match=rf"^rank 0 wants to use an average again at step {step}, but there is"):
            store.commit(0, EPOCH, step, Ending(0.1, again=True), b"")
        push_all(store, 0, step)
        store.commit(0, EPOCH, step, Ending(0.1), b"")


def test_a_slice_hands_out_its_own_words() -> None:
    store = SyncStore(Shard(16, 48), PLAN, 1, epoch=EPOCH, piece=16)
    store.begin(SGD())
    store.commit(0, EPOCH, 0, Ending(1.0), b"", ahead=True)
    done = push(store, 0, 1, 16, 33)
    assert [(r.start, r.words.size) for r in done.results] == [(16, 16)]
    assert_same_bits(done.results[0].words, -gradients_of(0, 0, LENGTH)[16:32])


def test_the_optimizers_state_of_one_server_is_another_ones() -> None:
    """With slices that are cut anew."""
    slices = []
    for start, stop in ((0, 32), (32, LENGTH)):
        store = SyncStore(Shard(start, stop), PLAN, 1, epoch=EPOCH, piece=16)
        store.begin(SGD())
        for number, bucket in enumerate(PLAN):
            if (first := max(bucket.start, start)) < (last := min(bucket.stop, stop)):
                push(store, 0, number, first, last)
        store.commit(0, EPOCH, 0, Ending(1.0), b"")
        slices.append(store.optimizer_slice())
    other = SyncStore(Shard(16, 48), PLAN, 1, epoch=EPOCH, piece=16)
    other.begin(SGD())
    other.load_optimizer(slices)
    found = other.optimizer_slice()
    assert (found.start, found.stop, [*found.arrays]) == (16, 48, ["sum_0"])
    assert_same_bits(found.arrays["sum_0"], gradients_of(0, 0, LENGTH)[16:48])


def test_a_server_without_an_optimizer_has_no_state_of_one() -> None:
    store = begun(1, updates=False)
    store.load_optimizer([])
    assert store.optimizer_slice() == Slice(0, LENGTH, {})


def test_parameters_come_unasked() -> None:
    with pytest.raises(
        ProtocolError, match=r"^rank 1 asked for parameters at step 4, which come unasked in sync mode$"
    ):
        begun(2, updates=True).pull(1, EPOCH, 4)


def test_an_optimizer_named_later_updates_what_the_program_changes() -> None:
    store = begun(1, updates=False)
    with pytest.raises(ProtocolError, match=r"^optimizer state was sent before an optimizer was named$"):
        store.program.load([])
    assert store.program.state() is None
    store.program.configure(Momentum(momentum=0.5), Layout.of([("w", (LENGTH,))]), ["w"])
    push_all(store, 0)
    store.commit(0, EPOCH, 0, Ending(rate_of(0)), b"\1")
    expected = parameters_after(1, 1, [Bucket(0, LENGTH)], LENGTH)
    np.testing.assert_allclose(store.parameters, expected, rtol=1e-5)
    (state,) = store.program.state() or []
    np.testing.assert_array_equal(state.values, gradients_of(0, 0, LENGTH))
    store.program.load([replace(state, values=np.zeros(LENGTH, np.float32))])
    changed = np.arange(LENGTH, dtype=np.float32)
    store.program.replace(0, EPOCH, 1, 0, changed[:9])
    store.program.replace(0, EPOCH, 1, 9, changed[9:])
    push_all(store, 0, 1)
    store.commit(0, EPOCH, 1, Ending(0.5, replaced=True), b"\1")
    np.testing.assert_allclose(store.parameters, changed - 0.5 * gradients_of(0, 1, LENGTH), rtol=1e-5)


@pytest.mark.parametrize(
    "changed",
    [{"slot": 1}, {"size": LENGTH - 1}, {"first": 1}, {"values": np.zeros(2, np.float32)}]
    + [{"size": size, "first": first, "values": np.zeros(1, np.float32)} for size, first in ((2, 0), (1, 1))],
)
def test_state_that_fits_no_parameter_is_refused(changed: dict[str, Any]) -> None:
    store = begun(1, updates=False)
    store.program.configure(Momentum(momentum=0.5), Layout.of([("w", (LENGTH,))]), ["w"])
    fitting = Accumulator("w" * 90, 0, LENGTH, 0, np.zeros(LENGTH, np.float32))
    wrong = replace(fitting, **changed)
    run = re.escape(str((wrong.size, wrong.first, wrong.values.size)))
    text = f"^optimizer state '{'w' * 80}', of size, start and count {run}, does not fit$"
    with pytest.raises(ProtocolError, match=text):
        store.program.load([fitting, wrong])


def test_a_number_is_state_of_any_parameter() -> None:
    store = begun(1, updates=False)
    store.program.configure(Momentum(momentum=0.5), Layout.of([("w", (LENGTH,))]), ["w"])
    with pytest.raises(UsageError, match=r"w not found$"):  # as far as the optimizer
        store.program.load([Accumulator("b_v", 0, 1, 0, np.zeros(1, np.float32))])


def test_a_parameter_that_no_backward_reached_stays() -> None:
    store = begun(1, updates=False)
    store.program.configure(SGD(), Layout.of([("w", (LENGTH,))]), ["w"])
    push_all(store, 0)
    store.commit(0, EPOCH, 0, Ending(0.5), b"\0")
    assert_same_bits(store.parameters, initial_parameters(LENGTH))


def test_arrays_are_made_as_asked_and_large_pieces_are_shared_with_the_helper() -> None:
    made: list[int] = []

    def empty(count: int) -> FloatArray:
        made.append(count)
        return aligned_empty(count)

    length = 1 << 19
    with ThreadPoolExecutor(1) as helper, patch.object(helper, "submit", wraps=helper.submit) as submit:
        store = SyncStore(Shard(0, length), [Bucket(0, length)], 1, epoch=EPOCH, empty=empty, piece=16, helper=helper)
        store.begin(SGD())
        store.push(0, EPOCH, 0, 0, 0, np.ones(length, np.float32))
        assert submit.call_count == 1  # with half of what is to be averaged
        store.commit(0, EPOCH, 0, Ending(1.0), b"")
        assert submit.call_count == 2  # with pieces to be updated
        assert (store.parameters == -1).all()
    assert made


@pytest.mark.parametrize(("sent", "near", "there"), [(True, False, [SENT_PIECE]), (True, True, []), (False, True, [])])
def test_what_is_sent_between_hosts_is_answered_in_smaller_pieces(sent: bool, near: bool, there: list[int]) -> None:
    store = make_store(SYNC, Shard(0, PIECE), [Bucket(0, PIECE)], 2, epoch=EPOCH, sent=sent, near=near)
    list(store.begin(SGD()))
    for rank in range(2):
        store.commit(rank, EPOCH, 0, Ending(rate_of(0)), b"", ahead=True)
    half = np.ones(SENT_PIECE, np.float32)
    assert not store.push(0, EPOCH, 0, 0, 0, half).results
    assert [result.words.size for result in store.push(1, EPOCH, 0, 0, 0, half).results] == there
