"""The store against a model of plain NumPy: what it keeps, averages and gives back."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import numpy as np
import pytest

from common.errors import ProtocolError
from common.system.memory import aligned_empty
from common.tensors.arena import FloatArray
from common.tensors.buckets import Bucket, pieces_of
from common.tensors.parts import PADDING
from ps.store.contributions import WORTH_HELP
from ps.store.ending import Ending
from ps.store.shards import Shard, plan_shards
from ps.store.step_state import StepState
from tests.support.groups import assert_same_bits, reduced, sample
from tests.support.store_model import (
    EPOCH,
    LENGTH,
    PLAN,
    NumpySGD,
    canonical_mean,
    deliver,
    gradients_of,
    in_pieces,
    initial_parameters,
    make_store,
    parameters_after,
    play_step,
    rate_of,
    refused,
)


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
    store = StepState(shard, PLAN, 3, epoch=EPOCH, empty=empty)
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


def take_step(store: StepState, step: int, in_place: Sequence[int]) -> None:
    for rank in range(store.nranks):
        for number, bucket in enumerate(PLAN):
            a, b = max(bucket.start, store.shard.start), min(bucket.stop, store.shard.stop)
            if a < b:
                words = gradients_of(rank, step, LENGTH)[a:b]
                if store.push(rank, EPOCH, step, number, a, b - a if rank in in_place else words):
                    store.reduce(number)


@pytest.mark.parametrize("with_the_update", [False, True])
def test_what_was_pushed_is_given_back_once_it_is_averaged(with_the_update: bool) -> None:
    store = make_store(Shard(16, LENGTH), PLAN, 2, LENGTH, piece=16)
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
                store.update_pieces(updater)
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
        assert_same_bits(store.parameters[:32], parameters_after(1, 2, PLAN, LENGTH)[16:48])
    else:
        assert_same_bits(store.gradients[:32], reduced(sources, "mean"))


def test_the_average_may_be_read_while_rank_0_pushes_the_next_step() -> None:
    for in_place in ((), (1,), (0, 1, 2)):
        store = StepState(Shard(0, LENGTH), PLAN, 3, epoch=EPOCH)
        for rank in in_place:
            store.read_in_place(rank, gradients_of(rank, 0, LENGTH))
        take_step(store, 0, in_place)
        for rank in range(3):
            store.commit(rank, EPOCH, 0, Ending(0.1, update=False))
        store.average()
        average = store.gradients
        before = average.copy()
        for number, b in enumerate(PLAN):
            words = np.full(b.stop - b.start, 7, np.float32)
            store.push(0, EPOCH, 1, number, b.start, words.size if 0 in in_place else words)
        assert_same_bits(average, before)


def test_who_reads_in_place_only_later_reads_the_average_too() -> None:
    """Rank 0's first words came before any other trainer had told where its gradients lie."""
    store = StepState(Shard(0, LENGTH), PLAN, 2, epoch=EPOCH)
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
    average = store.gradients
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
    store = StepState(Shard(0, LENGTH), PLAN, 2, epoch=EPOCH)
    store.read_in_place(1, gradients_of(1, 0, LENGTH))
    for rank, data in ((0, 16), (1, gradients_of(1, 0, LENGTH)[:16])):
        with pytest.raises(ProtocolError, match=f"rank {rank} pushed words at step 0 where they are not expected"):
            store.push(rank, EPOCH, 0, 2, 0, data)


@pytest.mark.parametrize("in_place", [True, False])
def test_half_of_a_large_bucket_is_reduced_on_the_helper(in_place: bool) -> None:
    shard = Shard(0, 2 * WORTH_HELP)
    for dtype in ("float32", "float64"):
        plan = (Bucket(16, shard.stop, dtype), Bucket(0, 16, dtype))
        sources = [sample(rank, shard.length, "float32") for rank in range(3)]
        with ThreadPoolExecutor(1) as helper, patch.object(helper, "submit", wraps=helper.submit) as submit:
            store = StepState(shard, plan, 3, helper=helper)
            for rank, source in enumerate(sources):
                if in_place:
                    store.read_in_place(rank, source)
                for a, b in pieces_of(16, shard.stop, 100_000 * (1 + rank)):  # cut at other places for each
                    if store.push(rank, 0, 0, 0, a, b - a if in_place else source[a:b]):
                        store.reduce(0)
        expected = reduced([source[16:].view(dtype) for source in sources], "mean")
        assert_same_bits(store.gradients[16:].view(dtype), expected)
        assert submit.called


@pytest.mark.parametrize("helps", [True, False])
@pytest.mark.parametrize("size", [WORTH_HELP - 1, WORTH_HELP])
def test_half_of_what_is_worth_it_is_handed_over(helps: bool, size: int) -> None:
    """Of a bucket that lies far from the slice's start."""
    source = sample(0, 2 * WORTH_HELP + size, "float32")
    plan = (Bucket(2 * WORTH_HELP, source.size), Bucket(0, 2 * WORTH_HELP))
    with ThreadPoolExecutor(1) as helper, patch.object(helper, "submit", wraps=helper.submit) as submit:
        store = StepState(Shard(0, source.size), plan, 1, helper=helper if helps else None)
        if store.push(0, 0, 0, 0, plan[0].start, source[plan[0].start :]):
            store.reduce(0)
    assert_same_bits(store.gradients[plan[0].start :], source[plan[0].start :])
    halves = [call.args[3:5] for call in submit.call_args_list]
    assert halves == ([(plan[0].start + size // 2, plan[0].stop)] if helps and size == WORTH_HELP else [])
