"""Gather, broadcast and barrier; operations that follow each other."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

from common.kernels.loader import KERNELS_VARIABLE
from common.tensors.buckets import chunk_bounds
from tests.support.collectives import PIECE, backends, filled, ranks
from tests.support.groups import (
    BACKENDS,
    assert_same_bits,
    barrier_of,
    cuts_of,
    on_ranks,
    opened,
    reduced,
    sample,
    transport_of,
)
from tests.support.pairwise import combined

OPERATIONS = ("all_reduce", "reduce_scatter", "broadcast", "all_gather")


@backends
@ranks
def test_all_gather_stacks_in_rank_order(groups, backend, nranks):
    cases = [((0,), "float32"), ((1,), "uint8"), ((3, 5), "float64"), ((2, PIECE + 17), "float32")]

    def mine(rank, shape, dtype, k):
        return sample(rank, shape, dtype, seed=k)

    def body(group):
        return [group.all_gather(mine(group.rank, *case, k)) for k, case in enumerate(cases)]

    for results in groups.run(backend, nranks, body):
        for result, (k, case) in zip(results, enumerate(cases), strict=True):
            assert_same_bits(result, np.stack([mine(r, *case, k) for r in range(nranks)]))


@backends
def test_all_gather_takes_what_is_not_contiguous_and_leaves_it_alone(groups, backend):
    def body(group):
        array = sample(group.rank, (40, 6), "float32")
        gathered = group.all_gather(array[::3, 1:4])
        assert_same_bits(array, sample(group.rank, (40, 6), "float32"))
        return gathered

    for result in groups.run(backend, 3, body):
        assert_same_bits(result, np.stack([sample(r, (40, 6), "float32")[::3, 1:4] for r in range(3)]))


@backends
@ranks
def test_broadcast_copies_each_root(groups, backend, nranks):
    def body(group):
        results = []
        for root in range(nranks):
            for size in (0, 1, 17, 2 * PIECE + 5):
                array = sample(group.rank, size, "float32", seed=root)
                group.broadcast(array, root)
                results.append(array)
        return results

    expected = [
        sample(root, size, "float32", seed=root) for root in range(nranks) for size in (0, 1, 17, 2 * PIECE + 5)
    ]
    for results in groups.run(backend, nranks, body):
        for result, right in zip(results, expected, strict=True):
            assert_same_bits(result, right)


@backends
@ranks
def test_nobody_leaves_a_barrier_before_everyone_has_come(groups, backend, nranks):
    came = []

    def body(group):
        for i in range(20):
            came.append(i)
            group.barrier()
            assert came.count(i) == nranks
            group.barrier()

    groups.run(backend, nranks, body)


def late(group, until):
    """Let this rank read late what others sent: once the event is set, or after a moment."""
    if hasattr(group._algorithm, "transport"):
        transport_of(group).receive = partial(wait_and_call, until, transport_of(group).receive)
    else:
        barrier_of(group).meet = partial(call_and_wait, until, barrier_of(group).meet)


def wait_and_call(until, method, *args):
    until.wait(0.05)
    return method(*args)


def call_and_wait(until, method):
    method()
    until.wait(0.05)


@combined("backend, operation, size, shared", BACKENDS, OPERATIONS, [1009, 300_007], [False, True])
def test_what_an_operation_returned_may_be_overwritten_at_once(backend, operation, size, shared):
    """Although the right neighbour has yet to read the last of it."""
    inputs, overwritten = [sample(rank, size, "float32") for rank in range(2)], threading.Event()
    expected = {
        "all_reduce": reduced(inputs, "mean"),
        "reduce_scatter": reduced(inputs, "mean")[cuts_of(size, 2)[1] :],
        "broadcast": inputs[0],
        "all_gather": np.stack(inputs),
    }

    def body(group):
        array = filled(group, size, "float32", shared)
        result = getattr(group, operation)(array)
        result = array if result is None else result
        if group.rank == 0:
            result.fill(np.nan)
            overwritten.set()
        return result

    with opened(backend, 2) as every:
        late(every[1], overwritten)
        assert_same_bits(on_ranks(every, body)[1], expected[operation])


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_a_rank_that_is_quick_may_post_for_the_next_short_call(operation, monkeypatch):
    """Though others have yet to read what all have posted for this one. (Where meetings are compiled, a model shows it:
    tests/unit/common/test_meeting.py.)"""
    monkeypatch.setenv(KERNELS_VARIABLE, "off")
    first, second = ([sample(rank, 1009, "float32", seed=seed) for rank in range(2)] for seed in (1, 2))
    posted = threading.Event()

    def body(group):
        if group.rank == 0:
            exchange = barrier_of(group).exchange

            def exchange_and_tell(note):
                if group._calls == 2:  # all chunks of the second call are posted
                    posted.set()
                return exchange(note)

            barrier_of(group).exchange = exchange_and_tell
        arrays = [inputs[group.rank].copy() for inputs in (first, second)]
        results = [getattr(group, operation)(array, "sum") for array in arrays]
        return arrays if operation == "all_reduce" else results

    with opened("shm", 2) as every:
        late(every[1], posted)
        results = on_ranks(every, body)
    for rank, found in enumerate(results):
        mine = slice(None) if operation == "all_reduce" else slice(*chunk_bounds(1009, 2)[rank])
        for result, inputs in zip(found, (first, second), strict=True):
            assert_same_bits(result, reduced(inputs, "sum")[mine])


@backends
def test_operations_may_follow_each_other_in_any_mix(groups, backend):
    def body(group):
        a, b = np.full(17, group.rank + 1.0), np.full((2, 3), group.rank, np.int64)
        for _ in range(10):
            group.all_reduce(a, "mean")
            group.broadcast(b, 2)
            group.barrier()
            a[:] = group.all_gather(a).sum(0)
        return a[0], b[0, 0]

    assert groups.run(backend, 3, body) == [(2.0 * 3**10, 2)] * 3


def test_an_array_is_had_in_common_by_all_or_by_none():
    def body(group):
        whole, other = group.empty(1000), np.zeros(1000, np.float32)
        part = group.empty(1000 + 16)[:1000]
        kinds = [whole, other, part]
        found = [group.share(kinds[kind if group.rank == 1 else 0]) for kind in (1, 2, 0)]
        whole[group.rank] = 7 + group.rank
        group.barrier()
        return found, whole[:2].tolist()

    with opened("shm", 2) as groups:
        assert on_ranks(groups, body) == [([False, False, True], [7, 8])] * 2
