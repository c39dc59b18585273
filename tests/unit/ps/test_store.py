"""The store against a model of plain NumPy: whatever the order of messages, whatever illegal ones come between."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import GradSyncError, LayoutMismatch, ProtocolError, StaleEpoch
from common.system.memory import aligned_empty
from common.tensors.arena import FloatArray
from common.tensors.buckets import Bucket, segments, words
from common.tensors.updater import PADDING, InPieces
from ps.store.shards import Shard, plan_shards, shard_of_bucket
from ps.store.store import WORTH_HELP, Ending, Store
from tests.support.groups import assert_same_bits, reduced, sample

EPOCH = 3


class NumpySGD:
    """The smallest updater: p -= lr * g, in the type of each bucket."""

    def __init__(self, store: Store) -> None:
        self.parameters, self.gradients = store.parameters, store.gradients  # kept by reference, as Paddle's do
        parts = [shard_of_bucket(store.shard, bucket) for bucket in store._buckets]
        self.slices = [
            (slice(p.start - store.shard.start, p.stop - store.shard.start), b.dtype)
            for p, b in zip(parts, store._buckets, strict=True)
        ]
        self.used: list[bytes] = []  # what it has been told of, step by step

    def step(self, learning_rate: float, used: bytes = b"") -> None:
        self.used.append(used)
        for where, dtype in self.slices:
            rate = np.dtype(dtype).type(learning_rate)
            self.parameters[where].view(dtype)[...] -= rate * self.gradients[where].view(dtype)


class PieceSGD:
    """As NumpySGD, of one piece at a time."""

    def __init__(self, store: Store) -> None:
        self.parameters, self.pieces = store.parameters, {piece.start: piece for piece in store.pieces()}
        self.dtypes = [bucket.dtype for bucket in store._buckets]

    def set_rate(self, learning_rate: float) -> None:
        self.rate = learning_rate

    def step(self, start: int, gradients: FloatArray) -> None:
        piece = self.pieces[start]
        parameters = self.parameters[start : piece.stop].view(self.dtypes[piece.bucket])
        parameters -= parameters.dtype.type(self.rate) * gradients.view(parameters.dtype)


def in_pieces(store: Store, helper: ThreadPoolExecutor | None = None) -> InPieces:
    longest = max((piece.stop - piece.start for piece in store.pieces()), default=0)
    return InPieces(PieceSGD(store), longest, helper=helper)


def rate_of(step: int) -> float:
    return 0.1 / (1 + step)


@functools.cache
def gradients_of(rank: int, step: int, length: int, buckets: tuple[Bucket, ...] = ()) -> FloatArray:
    """Words of mixed magnitudes, so that another order of summation gives other bits; float64 where a bucket is."""
    random = np.random.default_rng([rank, step, length])
    values = random.standard_normal(length) * 10.0 ** random.integers(-3, 4, length)
    found = values.astype(np.float32)
    for b in buckets:
        if b.dtype == "float64":
            found[b.start : b.stop] = values[b.start : b.start + b.length // 2].view(np.float32)
    return found


def initial_parameters(length: int) -> FloatArray:
    return np.random.default_rng(length).standard_normal(length).astype(np.float32)


def canonical_mean(sources: list[FloatArray], bucket: Bucket) -> npt.NDArray[Any]:
    """A bucket's mean in its type: 16-element units dealt to N chunks, chunk c summed from rank c+1 round to c."""
    values = [source[bucket.start : bucket.stop].view(bucket.dtype) for source in sources]
    nranks, size = len(values), values[0].size
    chunk = np.arange(size) // 16 * nranks // max(-(-size // 16), 1)
    mean = np.zeros_like(values[0])
    for c in range(nranks):
        total = values[(c + 1) % nranks].copy()
        for i in range(2, nranks + 1):
            total = total + values[(c + i) % nranks]
        mean[chunk == c] = (total * total.dtype.type(1.0 / nranks))[chunk == c]
    return mean


def updated(parameters: FloatArray, gradients_step: int, rate: float, nranks: int, buckets: list[Bucket]) -> FloatArray:
    """The parameters after one update by the mean of that step's gradients."""
    after, length = parameters.copy(), parameters.size
    sources = [gradients_of(rank, gradients_step, length, tuple(buckets)) for rank in range(nranks)]
    for b in buckets:
        after[b.start : b.stop].view(b.dtype)[...] -= np.dtype(b.dtype).type(rate) * canonical_mean(sources, b)
    return after


def parameters_after(steps: int, nranks: int, buckets: list[Bucket], length: int) -> FloatArray:
    parameters = initial_parameters(length)
    for step in range(steps):
        parameters = updated(parameters, step, rate_of(step), nranks, buckets)
    return parameters


def make_store(shard: Shard, buckets: list[Bucket], nranks: int, length: int, **options: Any) -> Store:
    store = Store(shard, buckets, nranks, epoch=EPOCH, **options)
    store.parameters[...] = initial_parameters(length)[shard.start : shard.stop]
    return store


@contextmanager
def refused(store: Store, *kinds: type[GradSyncError], text: str | None = None) -> Iterator[None]:
    """The block raises exactly one of `kinds`, and leaves the store as it was."""
    before = copy.deepcopy(vars(store))
    with pytest.raises(kinds, match=text) as caught:
        yield
    assert type(caught.value) in kinds
    np.testing.assert_equal(vars(store), before)


def deliver(store: Store, rank: int, bucket: int, length: int, *, piece: int = 10**9) -> None:
    """Push the rest of a bucket in pieces, of one word more where that takes a whole element, and reduce it if it was
    the last."""
    part = shard_of_bucket(store.shard, store._buckets[bucket])
    piece += piece % words(store._buckets[bucket].dtype)
    gradients = gradients_of(rank, store.step, length, tuple(store._buckets))
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


@pytest.mark.parametrize("in_place", [(), (0,), (1,), (0, 1, 2)])
def test_memory_is_the_average_and_no_copy_of_what_trainers_have(in_place: Sequence[int]) -> None:
    made: list[int] = []

    def empty(count: int) -> FloatArray:
        made.append(count)
        return aligned_empty(count)

    shard = Shard(16, 48)
    store = Store(shard, PLAN, 3, epoch=EPOCH, empty=empty)
    store.keep_parameters_in(np.zeros(32, np.float32))
    elsewhere = {rank: gradients_of(rank, 0, LENGTH)[16:48] for rank in in_place}
    for rank, array in elsewhere.items():
        store.read_in_place(rank, array)
    take_step(store, 0, in_place)
    expected = [reduced([gradients_of(r, 0, LENGTH)[b.start : b.stop] for r in range(3)], "mean") for b in PLAN]
    for bucket, mean in zip(PLAN, expected, strict=True):
        a, b = max(bucket.start, 16), min(bucket.stop, 48)
        assert_same_bits(store.gradients[a - 16 : b - 16], mean[a - bucket.start : b - bucket.start])
    assert made == [32 + PADDING]
    for rank, array in elsewhere.items():
        assert_same_bits(array, gradients_of(rank, 0, LENGTH)[16:48])


def take_step(store: Store, step: int, in_place: Sequence[int]) -> None:
    for rank in range(store.nranks):
        for number, bucket in enumerate(PLAN):
            a, b = max(bucket.start, store.shard.start), min(bucket.stop, store.shard.stop)
            if a < b:
                words = gradients_of(rank, step, LENGTH)[a:b]
                if store.push(rank, EPOCH, step, number, a, b - a if rank in in_place else words):
                    store.reduce(number)


@pytest.mark.parametrize("with_the_update", [False, True])
def test_what_was_pushed_is_given_back_once_it_is_averaged(with_the_update: bool) -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH, piece=16)
    pushed = []
    if with_the_update:
        for rank in range(2):
            store.commit(rank, EPOCH, 0, Ending(rate_of(0)), ahead=True)
    updater = in_pieces(store)

    def push(rank: int, start: int, stop: int) -> list[bool]:
        """Which of all arrays pushed so far are still there."""
        array = gradients_of(rank, 0, LENGTH)[start:stop].copy()
        pushed.append(weakref.ref(array))
        complete = store.push(rank, EPOCH, 0, 1, start, array)
        del array
        if complete:
            if with_the_update:
                store.update(updater)
            else:
                store.reduce(1)
        return [each() is not None for each in pushed]

    assert push(0, 16, 32) == [True]
    assert push(0, 32, 48) == [True] * 2
    assert push(1, 16, 20) == [True] * 3  # not a whole piece
    assert push(1, 20, 40) == [False, True, False, True]  # its last 8 words are not averaged
    assert push(1, 40, 48) == [False] * 5
    sources = [gradients_of(rank, 0, LENGTH)[16:48] for rank in range(2)]
    if with_the_update:
        assert_same_bits(store.parameters[16:48], parameters_after(1, 2, PLAN, LENGTH)[16:48])
    else:
        assert_same_bits(store.gradients[16:48], reduced(sources, "mean"))


def test_the_average_may_be_read_while_rank_0_pushes_the_next_step() -> None:
    for in_place in ((), (1,), (0, 1, 2)):
        store = Store(Shard(0, LENGTH), PLAN, 3, epoch=EPOCH)
        for rank in in_place:
            store.read_in_place(rank, gradients_of(rank, 0, LENGTH))
        take_step(store, 0, in_place)
        for rank in range(3):
            store.commit(rank, EPOCH, 0, Ending(0.1, update=False))
        store.average()
        average = store.averaged()
        before = average.copy()
        for number, b in enumerate(PLAN):
            words = np.full(b.stop - b.start, 7, np.float32)
            store.push(0, EPOCH, 1, number, b.start, words.size if 0 in in_place else words)
        assert_same_bits(average, before)


def test_who_reads_in_place_only_later_reads_the_average_too() -> None:
    """Rank 0's first words came before any other trainer had told where its gradients lie."""
    store = Store(Shard(0, LENGTH), PLAN, 2, epoch=EPOCH)
    first = gradients_of(0, 0, LENGTH)
    store.push(0, EPOCH, 0, 0, PLAN[0].start, first[PLAN[0].start : PLAN[0].stop])
    store.read_in_place(1, gradients_of(1, 0, LENGTH))
    for number, b in enumerate(PLAN):
        if number:
            store.push(0, EPOCH, 0, number, b.start, first[b.start : b.stop])
        if store.push(1, EPOCH, 0, number, b.start, b.stop - b.start):
            store.reduce(number)
    for rank in range(2):
        store.commit(rank, EPOCH, 0, Ending(0.1, update=False))
    store.average()
    average = store.averaged()
    assert_same_bits(average, (first + gradients_of(1, 0, LENGTH)) * np.float32(0.5))
    before = average.copy()
    store.push(0, EPOCH, 1, 0, PLAN[0].start, np.full(PLAN[0].stop - PLAN[0].start, 7, np.float32))
    assert_same_bits(average, before)


def test_gradients_are_not_offered_after_words_of_the_same_step() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    deliver(store, 1, 0, LENGTH)
    with refused(store, ProtocolError, text="^rank 1 offered its gradients after it had pushed some of step 0$"):
        store.read_in_place(1, gradients_of(1, 0, LENGTH))


def test_words_and_references_are_not_mixed_up() -> None:
    store = Store(Shard(0, LENGTH), PLAN, 2, epoch=EPOCH)
    store.read_in_place(1, gradients_of(1, 0, LENGTH))
    for rank, data in ((0, 16), (1, gradients_of(1, 0, LENGTH)[:16])):
        with pytest.raises(ProtocolError, match=f"rank {rank} pushed words at step 0 where they are not expected"):
            store.push(rank, EPOCH, 0, 2, 0, data)


@pytest.mark.parametrize("in_place", [True, False])
def test_half_of_a_large_bucket_is_reduced_on_the_helper(in_place: bool) -> None:
    shard, threads = Shard(0, 2 * WORTH_HELP), set()

    class Helper(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            threads.add("helper")
            return super().submit(*args, **kwargs)

    for dtype in ("float32", "float64"):
        plan = (Bucket(16, shard.stop, dtype), Bucket(0, 16, dtype))
        sources = [sample(rank, shard.length, "float32") for rank in range(3)]
        with Helper(1) as helper:
            store = Store(shard, plan, 3, helper=helper)
            for rank, source in enumerate(sources):
                if in_place:
                    store.read_in_place(rank, source)
                for a, b in segments(16, shard.stop, 100_000 * (1 + rank)):  # cut at other places for each
                    if store.push(rank, 0, 0, 0, a, b - a if in_place else source[a:b]):
                        store.reduce(0)
        expected = reduced([source[16:].view(dtype) for source in sources], "mean")
        assert_same_bits(store.gradients[16:].view(dtype), expected)
    assert threads == {"helper"}


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
    with refused(store, kind, text=f"rank 0 .*{text}"):
        act(store)


def test_a_part_of_an_element_is_refused() -> None:
    store = make_store(Shard(0, 224), MIXED, 2, 224)
    with refused(store, ProtocolError, text="rank 1 pushed a part of an element, 7 words, of bucket 1 at step 0"):
        store.push(1, EPOCH, 0, 1, 96, np.ones(7, np.float32))


def test_an_element_twice_is_refused() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    store.push(1, EPOCH, 0, 0, 48, one)
    with refused(store, ProtocolError, text="rank 1 pushed words 48..49.*expected them from 49"):
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
    with refused(store, ProtocolError, text="rank 0 committed step 0 after 69 of 70 words"):
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
    with refused(store, ProtocolError, text="rank 0 sent more after committing step 0"):
        store.push(0, EPOCH, 0, 0, 70, np.empty(0, np.float32))
    with refused(store, ProtocolError, text="rank 0 sent more after committing step 0"):
        store.commit(0, EPOCH, 0, Ending(0.1))


def test_another_learning_rate_is_refused_naming_both() -> None:
    store = committed_by_rank_0()
    with refused(store, LayoutMismatch, text=r"rank 1 has learning rate 0\.2 at step 0, rank 0 has 0\.1"):
        store.commit(1, EPOCH, 0, Ending(0.2))


def test_the_step_before_is_refused_after_an_update() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 1, LENGTH)
    play_step(store, LENGTH)
    with refused(store, ProtocolError, text="rank 0 sent step 0, this is step 1"):
        store.commit(0, EPOCH, 0, Ending(0.1))
    with refused(store, ProtocolError, text="rank 0 sent step 0, this is step 1"):
        store.push(0, EPOCH, 0, 2, 0, one)


# ---- how a step ends --------------------------------------------------------------------------------------------

UPDATE, AVERAGE, AGAIN, REPLACED = (
    Ending(0.1),
    Ending(0.0, update=False),
    Ending(0.1, again=True),
    Ending(0.1, replaced=True),
)


def push_all(store: Store) -> None:
    for rank in range(store.nranks):
        for bucket in range(len(store._buckets)):
            deliver(store, rank, bucket, LENGTH)


def end(store: Store, ending: Ending, *, used: dict[int, bytes] | None = None) -> NumpySGD:
    """All commit; the step ends as they said."""
    updater, step = NumpySGD(store), store.step
    for rank in reversed(range(store.nranks)):
        complete = store.commit(rank, EPOCH, step, ending, (used or {}).get(rank, b""))
        assert complete == (rank == 0)
    assert store.ending == ending
    if ending.update:
        store.update(updater)
    else:
        store.average()
    assert store.step == step + 1
    return updater


def new_values(step: int, length: int) -> FloatArray:
    """What the program gives the parameters at a step."""
    return np.random.default_rng([77, step]).standard_normal(length).astype(np.float32)


def replace(store: Store, values: FloatArray, *, piece: int = 10**9) -> None:
    for start in range(store.shard.start, store.shard.stop, piece):
        store.replace(0, EPOCH, store.step, start, values[start : min(start + piece, store.shard.stop)])


def test_an_average_leaves_parameters_alone_and_can_be_read() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 3, LENGTH)
    push_all(store)
    updater = end(store, AVERAGE)
    assert updater.used == []
    assert store.parameters.tobytes() == initial_parameters(LENGTH).tobytes()
    sources = [gradients_of(rank, 0, LENGTH) for rank in range(3)]
    for bucket in PLAN:
        assert store.gradients[bucket.start : bucket.stop].tobytes() == canonical_mean(sources, bucket).tobytes()


def test_an_average_can_be_used_again_once() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    push_all(store)
    end(store, AVERAGE)
    end(store, AGAIN)
    expected = updated(initial_parameters(LENGTH), 0, 0.1, 2, PLAN)
    assert store.parameters.tobytes() == expected.tobytes()
    with refused(store, ProtocolError, text="^rank 1 wants to use an average again at step 2, but there is none$"):
        store.commit(1, EPOCH, 2, AGAIN)
    push_all(store)
    end(store, UPDATE)
    assert store.parameters.tobytes() == updated(expected, 2, 0.1, 2, PLAN).tobytes()


def test_the_last_of_two_averages_is_the_one_used_again() -> None:
    store = make_store(Shard(16, 48), PLAN, 2, LENGTH)
    for _ in range(2):
        push_all(store)
        end(store, AVERAGE)
    end(store, AGAIN)
    assert store.parameters.tobytes() == updated(initial_parameters(LENGTH), 1, 0.1, 2, PLAN)[16:48].tobytes()


def test_an_average_that_was_not_used_is_gone_after_an_update() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 1, LENGTH)
    for ending in (AVERAGE, UPDATE):
        push_all(store)
        end(store, ending)
    with refused(store, ProtocolError, text="^rank 0 wants to use an average again at step 2, but there is none$"):
        store.commit(0, EPOCH, 2, AGAIN)


def test_replaced_parameters_are_taken_before_the_update_not_earlier() -> None:
    store = make_store(Shard(16, 70), PLAN, 2, LENGTH)
    old, new = store.parameters.tobytes(), new_values(0, LENGTH)
    replace(store, new, piece=7)
    push_all(store)
    assert store.commit(0, EPOCH, 0, REPLACED) is False
    assert store.parameters.tobytes() == old
    assert store.commit(1, EPOCH, 0, REPLACED) is True
    assert store.parameters.tobytes() == old
    store.update(NumpySGD(store))
    assert store._replacement is None  # its memory is given back
    after = updated(new, 0, 0.1, 2, PLAN)[16:70]
    assert store.parameters.tobytes() == after.tobytes()
    push_all(store)
    end(store, UPDATE)  # they are taken once
    expected = updated(updated(new, 0, 0.1, 2, PLAN), 1, 0.1, 2, PLAN)[16:70]
    assert store.parameters.tobytes() == expected.tobytes()


def test_replacement_and_average_used_again_go_together() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    push_all(store)
    end(store, AVERAGE)
    replace(store, new_values(1, LENGTH))
    end(store, Ending(0.1, replaced=True, again=True))
    assert store.parameters.tobytes() == updated(new_values(1, LENGTH), 0, 0.1, 2, PLAN).tobytes()


def test_a_server_without_a_slice_ends_steps_in_every_way() -> None:
    store = make_store(Shard(LENGTH, LENGTH), PLAN, 2, LENGTH)
    for ending in (UPDATE, AVERAGE, AGAIN, REPLACED, Ending(0.1)):
        end(store, ending)
    assert store.step == 5


def test_a_parameter_is_used_if_any_rank_has_used_it() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 3, LENGTH)
    push_all(store)
    updater = end(store, UPDATE, used={0: b"\0\1\0\0", 1: b"\0\0\0\1", 2: b"\0\1\0\0"})
    assert updater.used == [b"\0\1\0\1"]
    push_all(store)
    updater = end(store, UPDATE, used={0: b"\1\0\0\0", 1: b"\0\0\0\0", 2: b"\0\0\0\0"})
    assert updater.used == [b"\1\0\0\0"]  # nothing of the step before
    push_all(store)
    assert end(store, UPDATE).used == [b""]


DISAGREEMENTS: dict[str, tuple[Ending, Ending, str]] = {
    "update against average": (
        UPDATE,
        AVERAGE,
        "ran another backward before optimizer.step() at step {step}, rank {other} called optimizer.step() after a "
        "backward; all ranks must do the same",
    ),
    "average against update": (
        AVERAGE,
        UPDATE,
        "called optimizer.step() after a backward at step {step}, rank {other} ran another backward before "
        "optimizer.step(); all ranks must do the same",
    ),
    "learning rate": (
        UPDATE,
        Ending(0.3),
        "has learning rate 0.3 at step {step}, rank {other} has 0.1; give all trainers the same --lr and scheduler",
    ),
    "replaced against kept": (
        UPDATE,
        REPLACED,
        "changed its parameters at step {step}, rank {other} kept its parameters; load the same state on all ranks",
    ),
    "kept against replaced": (
        REPLACED,
        UPDATE,
        "kept its parameters at step {step}, rank {other} changed its parameters; load the same state on all ranks",
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_another_ending_is_refused_saying_what_both_did(name: str) -> None:
    first, second, text = DISAGREEMENTS[name]
    store = make_store(Shard(0, LENGTH), PLAN, 3, LENGTH)
    push_all(store)
    replace(store, new_values(0, LENGTH))
    assert store.commit(0, EPOCH, 0, first) is False
    with refused(store, LayoutMismatch, text=f"^rank 2 {re.escape(text.format(step=0, other=0))}$"):
        store.commit(2, EPOCH, 0, second)


@pytest.mark.parametrize(("first", "second"), [(UPDATE, AGAIN), (AGAIN, UPDATE)])
def test_with_and_without_another_backward_is_refused(first: Ending, second: Ending) -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    push_all(store)
    end(store, AVERAGE)
    for rank, ending in enumerate((first, second)):
        if not ending.again:
            for bucket in range(3):
                deliver(store, rank, bucket, LENGTH)
    store.commit(0, EPOCH, 1, first)
    words = {UPDATE: "after a backward", AGAIN: "without another backward"}
    text = f"{words[second]} at step 1, rank 0 called optimizer.step() {words[first]}; all ranks must do the same"
    with refused(store, LayoutMismatch, text=rf"^rank 1 called optimizer\.step\(\) {re.escape(text)}$"):
        store.commit(1, EPOCH, 1, second)


def test_another_number_of_parameters_is_refused() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 3, LENGTH)
    push_all(store)
    store.commit(1, EPOCH, 0, UPDATE, b"\1\1\0")
    with refused(store, ProtocolError, text="^rank 0 told of 2 parameters at step 0, not 3$"):
        store.commit(0, EPOCH, 0, UPDATE, b"\1\1")
    with refused(store, ProtocolError, text="^rank 2 told of 0 parameters at step 0, not 3$"):
        store.commit(2, EPOCH, 0, UPDATE)


def test_a_mask_after_one_that_stands_for_all_is_refused() -> None:
    """Otherwise what the first has used would be left out."""
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    push_all(store)
    store.commit(0, EPOCH, 0, UPDATE)
    with refused(store, ProtocolError, text="^rank 1 told of 2 parameters at step 0, not 0$"):
        store.commit(1, EPOCH, 0, UPDATE, b"\0\1")


def test_an_average_to_be_used_again_is_refused_with_pushes() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    push_all(store)
    end(store, AVERAGE)
    deliver(store, 1, 2, LENGTH)
    with refused(store, ProtocolError, text="^rank 1 committed step 1 after 16 of 70 words$"):
        store.commit(1, EPOCH, 1, AGAIN)


def test_an_average_to_be_used_again_without_an_update_is_refused() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 1, LENGTH)
    push_all(store)
    end(store, AVERAGE)
    with refused(store, ProtocolError, text="^rank 0 wants to use an average again at step 1, but there is none$"):
        store.commit(0, EPOCH, 1, Ending(0.1, update=False, again=True))


def test_a_replacement_must_be_whole_from_rank_0_and_in_order() -> None:
    store, values = make_store(Shard(16, 48), PLAN, 2, LENGTH), new_values(0, LENGTH)
    push_all(store)
    with refused(store, ProtocolError, text="^rank 0 replaced 0 of 32 words at step 0$"):
        store.commit(0, EPOCH, 0, REPLACED)
    with refused(store, ProtocolError, text="^rank 1 sent parameters from word 16, expected 16 from rank 0$"):
        store.replace(1, EPOCH, 0, 16, values[16:48])
    with refused(store, ProtocolError, text="^rank 0 sent parameters from word 17, expected 16 from rank 0$"):
        store.replace(0, EPOCH, 0, 17, values[17:18])
    with refused(store, ProtocolError, text="^rank 0 sent parameters from word 16, expected 16 from rank 0$"):
        store.replace(0, EPOCH, 0, 16, values[16:49])
    store.replace(0, EPOCH, 0, 16, values[16:20])
    with refused(store, ProtocolError, text="^rank 0 sent parameters from word 16, expected 20 from rank 0$"):
        store.replace(0, EPOCH, 0, 16, values[16:20])
    with refused(store, ProtocolError, text="^rank 0 replaced 4 of 32 words at step 0$"):
        store.commit(0, EPOCH, 0, REPLACED)
    store.replace(0, EPOCH, 0, 20, values[20:48])
    with refused(store, ProtocolError, text="^rank 0 sent parameters from word 48, expected 48 from rank 0$"):
        store.replace(0, EPOCH, 0, 48, values[48:49])
    store.commit(0, EPOCH, 0, REPLACED)
    with refused(store, ProtocolError, text="^rank 0 sent more after committing step 0$"):
        store.replace(0, EPOCH, 0, 16, values[16:48])


@pytest.mark.parametrize(
    ("epoch", "step", "kind", "text"),
    [
        (2, 0, StaleEpoch, "^rank 0 sent a message of epoch 2, this is epoch 3$"),
        (EPOCH, 1, ProtocolError, "^rank 0 sent step 1, this is step 0$"),
    ],
)
def test_a_replacement_of_another_time_is_refused(epoch: int, step: int, kind: type[GradSyncError], text: str) -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    with refused(store, kind, text=text):
        store.replace(0, epoch, step, 0, one)


# ---- committed ahead --------------------------------------------------------------------------------------------


def test_pieces_are_updated_as_they_come_once_all_have_committed() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH, piece=16)
    updater, before, after = in_pieces(store), initial_parameters(LENGTH), parameters_after(1, 2, PLAN, LENGTH)
    assert [(p.start, p.stop) for p in store.pieces()] == [(48, 64), (64, 70), (16, 32), (32, 48), (0, 16)]

    def push(rank: int, bucket: int, start: int, stop: int) -> list[tuple[int, int]]:
        """What is updated with it."""
        if store.push(rank, EPOCH, 0, bucket, start, gradients_of(rank, 0, LENGTH)[start:stop]):
            if not store.committed:
                store.reduce(bucket)
            return store.update(updater) if store.is_due(in_pieces=True) else []
        return []

    assert push(0, 1, 16, 48) == []
    assert push(1, 1, 16, 33) == []  # averaged, but rank 1 has promised nothing
    assert store.commit(0, EPOCH, 0, Ending(rate_of(0)), ahead=True) is False
    assert not store.is_due(in_pieces=True)
    assert store.commit(1, EPOCH, 0, Ending(rate_of(0)), ahead=True) is False
    assert store.is_due(in_pieces=True)
    assert not store.is_due()
    assert store.update(updater) == [(16, 32)]
    assert_same_bits(store.parameters, np.concatenate([before[:16], after[16:32], before[32:]]))
    assert push(1, 0, 48, 70) == []
    assert push(1, 2, 0, 16) == []
    assert push(1, 1, 33, 48) == [(32, 48)]
    assert (store.waiting_for(), store.begun, store.step) == ([0], True, 0)
    assert push(0, 0, 48, 70) == [(48, 70)]
    assert push(0, 2, 0, 8) == []
    assert push(0, 2, 8, 16) == [(0, 16)]
    assert (store.waiting_for(), store.begun, store.step) == ([0, 1], False, 1)
    assert_same_bits(store.parameters, after)


def test_an_updater_of_the_whole_waits_for_all_that_was_committed_ahead() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH, piece=16)
    for rank in range(2):
        assert store.commit(rank, EPOCH, 0, Ending(rate_of(0)), ahead=True) is False
    deliver(store, 0, 0, LENGTH)
    deliver(store, 1, 0, LENGTH)
    assert not store.is_due()
    push_all(store)
    assert store.is_due()
    store.update(NumpySGD(store))
    assert_same_bits(store.parameters, parameters_after(1, 2, PLAN, LENGTH))


@pytest.mark.parametrize("ending", [AVERAGE, AGAIN, REPLACED])
def test_only_an_update_by_new_gradients_is_committed_ahead(ending: Ending) -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    with refused(
        store, ProtocolError, text="^rank 1 committed step 0 ahead, which is for updates by new gradients only$"
    ):
        store.commit(1, EPOCH, 0, ending, ahead=True)


def test_an_updater_of_pieces_uses_an_average_again() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH, piece=16)
    push_all(store)
    end(store, AVERAGE)
    for rank in range(2):
        store.commit(rank, EPOCH, 1, AGAIN)
    assert store.is_due(in_pieces=True)
    assert store.update(in_pieces(store)) == [(48, 70), (16, 48), (0, 16)]
    assert_same_bits(store.parameters, updated(initial_parameters(LENGTH), 0, 0.1, 2, PLAN))


# ---- two dtypes -------------------------------------------------------------------------------------------------

MIXED = [Bucket(160, 224, "float64"), Bucket(96, 160, "float64"), Bucket(32, 96), Bucket(0, 32)]


@pytest.mark.parametrize("nranks", [1, 2, 3, 4])
@pytest.mark.parametrize("servers", [1, 2, 3, 5, 14, 20])
def test_float64_is_averaged_in_float64_wherever_a_shard_cuts_it(nranks: int, servers: int) -> None:
    stores = [make_store(shard, MIXED, nranks, 224) for shard in plan_shards(224, servers)]
    for _ in range(3):
        for store in stores:
            play_step(store, 224, piece=7)
    together = np.concatenate([store.parameters for store in stores])
    assert together.tobytes() == parameters_after(3, nranks, MIXED, 224).tobytes()


def test_the_model_of_these_tests_tells_float64_from_float32() -> None:
    sources = [gradients_of(rank, 0, 224, tuple(MIXED)) for rank in range(3)]
    mean = canonical_mean(sources, MIXED[0])
    assert mean.dtype == np.float64
    assert (mean != mean.astype(np.float32)).all()
    wide = [source[160:224].view(np.float64) for source in sources]
    np.testing.assert_allclose(mean, np.mean(wide, axis=0), rtol=1e-9, atol=1e-12)


# ---- any order, any pieces, any sizes ---------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, list[Bucket]]:
    """An arena's length and its bucket plan, from the end to the start; cuts lie anywhere."""
    length = draw(st.integers(0, 130))
    edges = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=4))})
    return length, [Bucket(a, b) for a, b in pairwise(edges)][::-1]


@st.composite
def mixed_plans(draw: st.DrawFn) -> tuple[int, list[Bucket]]:
    """As of arenas: cut at cache lines, each bucket of either dtype."""
    units = sorted(draw(st.sets(st.integers(1, 9), max_size=4)))
    edges = [16 * unit for unit in [0, *units]]
    dtypes = st.sampled_from(["float32", "float64"])
    return edges[-1], [Bucket(a, b, draw(dtypes)) for a, b in pairwise(edges)][::-1]


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(plans(), mixed_plans()),
    st.integers(1, 4),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
    st.integers(1, 60),
)
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


USED = 3  # parameters that the masks of the machine tell of


def mask_of(rank: int, step: int) -> bytes:
    return np.random.default_rng([rank, step]).integers(0, 2, USED).astype(np.uint8).tobytes()


class StoreMachine(RuleBasedStateMachine):
    """Trainers of several servers push, replace parameters and end steps as they like, all in the same way; each server
    is compared with the whole model. How steps end is drawn once, and repeats."""

    @initialize(
        plan=st.one_of(plans(), mixed_plans()),
        nranks=st.integers(1, 4),
        servers=st.integers(1, 4),
        kinds=st.lists(st.sampled_from(["update", "average", "replaced", "again", "again, replaced"]), min_size=1),
        piece=st.sampled_from([16, 48, 1 << 62]),
        takes_pieces=st.booleans(),
    )
    def begin(
        self,
        plan: tuple[int, list[Bucket]],
        nranks: int,
        servers: int,
        kinds: list[str],
        piece: int,
        takes_pieces: bool,
    ) -> None:
        self.kinds = kinds
        self.length, self.buckets = plan
        self.nranks = nranks
        shards = plan_shards(self.length, servers)
        self.stores = [make_store(s, self.buckets, nranks, self.length, piece=piece) for s in shards]
        self.piece, self.takes_pieces = piece, takes_pieces
        self.models = [initial_parameters(self.length)]
        self.endings: list[Ending] = []
        self.sent = [self.nothing_sent() for _ in self.stores]
        self.replaced = [0 for _ in self.stores]
        self.committed: list[set[int]] = [set() for _ in self.stores]
        self.ahead: list[set[int]] = [set() for _ in self.stores]
        self.averaged = [[0] * len(self.buckets) for _ in self.stores]  # words of each bucket
        self.updated = [[0] * len(self.buckets) for _ in self.stores]

    def nothing_sent(self) -> list[list[int]]:
        return [[0] * len(self.buckets) for _ in range(self.nranks)]

    def ending(self, step: int) -> Ending:
        while len(self.endings) <= step:
            at = len(self.endings)
            kind, averaged = self.kinds[at % len(self.kinds)], at > 0 and not self.endings[-1].update
            self.endings.append(
                Ending(0.0, update=False)
                if kind == "average"
                else Ending(rate_of(at), replaced="replaced" in kind, again=averaged and "again" in kind)
            )
        return self.endings[step]

    def part(self, server: int, bucket: int) -> Shard:
        return shard_of_bucket(self.stores[server].shard, self.buckets[bucket])

    def left(self, server: int, rank: int, bucket: int) -> int:
        """Words still to be pushed."""
        again = self.ending(self.stores[server].step).again
        return 0 if again else self.part(server, bucket).length - self.sent[server][rank][bucket]

    def open_ranks(self) -> list[tuple[int, int]]:
        pairs = [(s, r) for s in range(len(self.stores)) for r in range(self.nranks)]
        return [(s, r) for s, r in pairs if r not in self.committed[s]]

    def pending(self) -> list[tuple[int, int, int]]:
        pairs = self.open_ranks() + [(s, r) for s, ranks in enumerate(self.ahead) for r in sorted(ranks)]
        triples = [(s, r, b) for s, r in pairs for b in range(len(self.buckets))]
        return [triple for triple in triples if self.left(*triple)]

    def to_replace(self, server: int) -> int:
        """Words of the parameters that rank 0 has still to send to this server before it commits."""
        store = self.stores[server]
        return store.shard.length - self.replaced[server] if self.ending(store.step).replaced else 0

    def replacing(self) -> list[int]:
        return [s for s in range(len(self.stores)) if 0 not in self.committed[s] and self.to_replace(s)]

    def ready(self) -> list[tuple[int, int]]:
        waiting = {(s, r) for s, r, _ in self.pending()} | {(s, 0) for s in self.replacing()}
        return [pair for pair in self.open_ranks() if pair not in waiting]

    def push(self, server: int, rank: int, bucket: int, size: int) -> None:
        store, sent = self.stores[server], self.sent[server]
        start = self.part(server, bucket).start + sent[rank][bucket]
        data = gradients_of(rank, store.step, self.length, tuple(self.buckets))[start : start + size]
        complete = store.push(rank, EPOCH, store.step, bucket, start, data)
        sent[rank][bucket] += size
        least, part = min(sent[r][bucket] for r in range(self.nranks)), self.part(server, bucket)
        there = least if least == part.length else least // self.piece * self.piece
        assert complete == (there > self.averaged[server][bucket])
        if complete:
            if not (self.takes_pieces and store.committed):
                store.reduce(bucket)
            self.averaged[server][bucket] = there
        self.go_on(server)

    def replace(self, server: int, size: int) -> None:
        store = self.stores[server]
        start = store.shard.start + self.replaced[server]
        store.replace(0, EPOCH, store.step, start, new_values(store.step, self.length)[start : start + size])
        self.replaced[server] += size

    def commit(self, server: int, rank: int, *, ahead: bool = False) -> None:
        store, ending = self.stores[server], self.ending(self.stores[server].step)
        complete = store.commit(rank, EPOCH, store.step, ending, mask_of(rank, store.step), ahead=ahead)
        self.committed[server].add(rank)
        if ahead:
            self.ahead[server].add(rank)
        assert complete == all(self.finished(server, r) for r in range(self.nranks))
        assert store.ending == ending
        self.go_on(server)

    def finished(self, server: int, rank: int) -> bool:
        owes = any(self.left(server, rank, b) for b in range(len(self.buckets)))
        return rank in self.committed[server] and not owes

    def go_on(self, server: int) -> None:
        """Update, or average, if it is time for that."""
        store, step = self.stores[server], self.stores[server].step
        ending = self.ending(step)
        all_committed = len(self.committed[server]) == self.nranks
        all_there = all(self.finished(server, r) for r in range(self.nranks))
        a_piece = self.takes_pieces and self.averaged[server] != self.updated[server]
        due = all_committed and (all_there or a_piece)
        assert store.is_due(in_pieces=self.takes_pieces) == due
        if not due:
            return
        if not ending.update:
            store.average()
            self.compare_average(store, step)
        elif self.takes_pieces:
            runs = store.update(in_pieces(store))
            if not (ending.again or ending.replaced):
                assert sum(b - a for a, b in runs) == sum(self.averaged[server]) - sum(self.updated[server])
                self.updated[server] = list(self.averaged[server])
        else:
            updater = NumpySGD(store)
            assert store.update(updater) == [(store.shard.start, store.shard.stop)]
            masks = [np.frombuffer(mask_of(r, step), np.uint8) for r in range(self.nranks)]
            assert updater.used == [np.bitwise_or.reduce(masks).tobytes()]
        assert store.step == step + all_there
        if all_there:
            self.sent[server], self.committed[server], self.replaced[server] = self.nothing_sent(), set(), 0
            self.ahead[server] = set()
            self.averaged[server], self.updated[server] = ([0] * len(self.buckets) for _ in range(2))

    def compare_average(self, store: Store, step: int) -> None:
        sources = [gradients_of(rank, step, self.length, tuple(self.buckets)) for rank in range(self.nranks)]
        mean = np.zeros(self.length, np.float32)
        for b in self.buckets:
            mean[b.start : b.stop].view(b.dtype)[...] = canonical_mean(sources, b)
        assert store.gradients.tobytes() == mean[store.shard.start : store.shard.stop].tobytes()

    def model(self, step: int) -> FloatArray:
        while len(self.models) <= step:
            done = len(self.models) - 1
            ending, parameters = self.ending(done), self.models[-1]
            if ending.update:
                base = new_values(done, self.length) if ending.replaced else parameters
                parameters = updated(base, done - ending.again, ending.learning_rate, self.nranks, self.buckets)
            self.models.append(parameters)
        return self.models[step]

    @precondition(lambda self: self.pending())
    @rule(data=st.data())
    def push_a_piece(self, data: st.DataObject) -> None:
        server, rank, bucket = data.draw(st.sampled_from(self.pending()))
        word = words(self.buckets[bucket].dtype)
        self.push(server, rank, bucket, word * data.draw(st.integers(0, self.left(server, rank, bucket) // word)))

    @precondition(lambda self: self.replacing())
    @rule(data=st.data())
    def replace_a_piece(self, data: st.DataObject) -> None:
        server = data.draw(st.sampled_from(self.replacing()))
        self.replace(server, data.draw(st.integers(0, self.to_replace(server))))

    @precondition(lambda self: self.open_ranks())
    @rule(data=st.data())
    def send_the_rest_and_commit(self, data: st.DataObject) -> None:
        server, rank = data.draw(st.sampled_from(self.open_ranks()))
        for bucket in data.draw(st.permutations(range(len(self.buckets)))):
            self.push(server, rank, bucket, self.left(server, rank, bucket))
        if rank == 0:
            self.replace(server, self.to_replace(server))
        self.commit(server, rank)

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def commit_when_ready(self, data: st.DataObject) -> None:
        self.commit(*data.draw(st.sampled_from(self.ready())))

    @rule(data=st.data(), epoch=st.sampled_from([0, EPOCH - 1, EPOCH + 1]))
    def another_epoch(self, data: st.DataObject, epoch: int) -> None:
        store, rank = data.draw(st.sampled_from(self.stores)), data.draw(st.integers(0, self.nranks - 1))
        self.refuse_all(store, StaleEpoch, rank, epoch, store.step)

    @rule(data=st.data(), offset=st.sampled_from([-1, 1, 7]))
    def another_step(self, data: st.DataObject, offset: int) -> None:
        store, rank = data.draw(st.sampled_from(self.stores)), data.draw(st.integers(0, self.nranks - 1))
        self.refuse_all(store, ProtocolError, rank, EPOCH, store.step + offset)

    def refuse_all(self, store: Store, kind: type[GradSyncError], rank: int, epoch: int, step: int) -> None:
        with refused(store, kind):
            store.push(rank, epoch, step, 0, store.shard.start, one)
        with refused(store, kind):
            store.commit(rank, epoch, step, Ending(rate_of(store.step)))
        with refused(store, kind):
            store.replace(rank, epoch, step, store.shard.start, one)

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

    @precondition(lambda self: self.open_ranks())
    @rule(data=st.data())
    def wrong_parameters(self, data: st.DataObject) -> None:
        server, rank = data.draw(st.sampled_from(self.open_ranks()))
        store = self.stores[server]
        at = store.shard.start + self.replaced[server]
        with refused(store, ProtocolError):
            store.replace(rank, EPOCH, store.step, at + 1, one)
        with refused(store, ProtocolError):
            store.replace(rank, EPOCH, store.step, at, np.ones(store.shard.stop - at + 1, np.float32))
        if rank:
            with refused(store, ProtocolError):
                store.replace(rank, EPOCH, store.step, at, one[:0])

    @precondition(lambda self: self.pending())
    @rule(data=st.data())
    def commit_with_pushes_missing(self, data: st.DataObject) -> None:
        server, rank, _ = data.draw(st.sampled_from(self.pending()))
        store = self.stores[server]
        with refused(store, ProtocolError):
            store.commit(rank, EPOCH, store.step, self.ending(store.step), mask_of(rank, store.step))

    @precondition(lambda self: any((s, 0) not in {(s, r) for s, r, _ in self.pending()} for s in self.replacing()))
    @rule(data=st.data())
    def commit_with_parameters_missing(self, data: st.DataObject) -> None:
        pushing = {(s, r) for s, r, _ in self.pending()}
        server = data.draw(st.sampled_from([s for s in self.replacing() if (s, 0) not in pushing]))
        store = self.stores[server]
        with refused(store, ProtocolError, text="rank 0 replaced"):
            store.commit(0, EPOCH, store.step, self.ending(store.step), mask_of(0, store.step))

    @precondition(lambda self: any(self.committed))
    @rule(data=st.data())
    def more_after_a_commit(self, data: st.DataObject) -> None:
        server = data.draw(st.sampled_from([s for s, ranks in enumerate(self.committed) if ranks]))
        rank, store = data.draw(st.sampled_from(sorted(self.committed[server]))), self.stores[server]
        if rank not in self.ahead[server]:
            self.refuse_all(store, ProtocolError, rank, EPOCH, store.step)
            return
        with refused(store, ProtocolError):
            store.commit(rank, EPOCH, store.step, self.ending(store.step), mask_of(rank, store.step), ahead=True)
        with refused(store, ProtocolError):
            store.replace(rank, EPOCH, store.step, store.shard.start, one)

    @precondition(lambda self: self.open_ranks())
    @rule(data=st.data())
    def commit_ahead(self, data: st.DataObject) -> None:
        server, rank = data.draw(st.sampled_from(self.open_ranks()))
        store = self.stores[server]
        ending = self.ending(store.step)
        if ending.update and not ending.again and not ending.replaced:
            self.commit(server, rank, ahead=True)
        else:
            with refused(store, ProtocolError):
                store.commit(rank, EPOCH, store.step, ending, mask_of(rank, store.step), ahead=True)

    @precondition(lambda self: any(self.committed[server] for server, _ in self.ready()))
    @rule(data=st.data(), what=st.sampled_from(["learning_rate", "update", "replaced", "again", "used"]))
    def disagree(self, data: st.DataObject, what: str) -> None:
        """With those who have committed, on any part of how the step ends."""
        pairs = [(server, rank) for server, rank in self.ready() if self.committed[server]]
        server, rank = data.draw(st.sampled_from(pairs))
        store, mask = self.stores[server], mask_of(rank, self.stores[server].step)
        ending = self.ending(store.step)
        if what == "used":
            with refused(store, ProtocolError):
                store.commit(rank, EPOCH, store.step, ending, mask + b"\1")
            return
        other = {
            "learning_rate": dataclasses.replace(ending, learning_rate=ending.learning_rate + 0.5),
            "update": dataclasses.replace(ending, update=not ending.update),
            "replaced": dataclasses.replace(ending, replaced=not ending.replaced),
            "again": dataclasses.replace(ending, again=not ending.again),
        }[what]
        impossible = what == "again" or (what == "update" and ending.again) or (what == "replaced" and rank == 0)
        with refused(store, LayoutMismatch, *[ProtocolError] * impossible):
            store.commit(rank, EPOCH, store.step, other, mask)

    @invariant()
    def every_server_has_its_slice_of_the_model(self) -> None:
        for server, store in enumerate(getattr(self, "stores", [])):
            expected = self.model(store.step).copy()
            for bucket, done in enumerate(self.updated[server]):
                if done:
                    new = slice(start := self.part(server, bucket).start, start + done)
                    expected[new] = self.model(store.step + 1)[new]
            assert store.parameters.tobytes() == expected[store.shard.start : store.shard.stop].tobytes()
            assert store.waiting_for() == [r for r in range(self.nranks) if not self.finished(server, r)]
            assert not store.padded_parameters[store.shard.length :].any()
            assert not store.padded_gradients[store.shard.length :].any()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
