"""All-reduce and reduce-scatter against naive NumPy, bit for bit, over every backend."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.collectives import BIG, CASES, NRANKS, filled, placed, sizes_of
from tests.support.groups import CANONICAL, assert_same_bits, cuts_of, on_ranks, opened, reduced, sample
from tests.support.pairwise import combined
from tests.support.thorough import LONG

OWNERS = {
    "all": {0, 1},
    "none": set(),
    "even": {0},
    "odd": {1},
}  # ranks mod 2 whose arrays are the group's
BIG_CASES = [(owners, "float32", "mean") for owners in OWNERS] + [("even", *case) for case in CASES if LONG]
everywhere_in_any_type = combined("backend, nranks, shared, case", CANONICAL, NRANKS, (False, True), CASES)


def test_the_samples_tell_orders_of_summation_apart():
    a, b, c = (sample(rank, 10_000, "float32") for rank in range(3))
    assert np.mean((a + b) + c != a + (b + c)) > 0.1


@everywhere_in_any_type
def test_all_reduce_equals_a_naive_reduction_in_canonical_order(groups, backend, nranks, shared, case):
    dtype, op = case

    def body(group):
        results = []
        for size in sizes_of(nranks):
            array = filled(group, size, dtype, shared)
            group.all_reduce(array, op)
            results.append(array.copy())
        return results

    expected = [reduced([sample(r, size, dtype) for r in range(nranks)], op) for size in sizes_of(nranks)]
    for results in groups.run(backend, nranks, body):
        for result, right in zip(results, expected, strict=True):
            assert_same_bits(result, right)


@everywhere_in_any_type
def test_reduce_scatter_gives_each_rank_its_chunk(groups, backend, nranks, shared, case):
    dtype, op = case

    def body(group):
        results = []
        for size in sizes_of(nranks):
            array = filled(group, size, dtype, shared)
            result = group.reduce_scatter(array, op)
            assert np.shares_memory(result, array) or result.size == 0
            results.append(result.copy())
        return results

    every = groups.run(backend, nranks, body)
    for i, size in enumerate(sizes_of(nranks)):
        expected, cuts = reduced([sample(r, size, dtype) for r in range(nranks)], op), cuts_of(size, nranks)
        for rank in range(nranks):
            assert_same_bits(every[rank][i], expected[cuts[rank] : cuts[rank + 1]])


@pytest.mark.again
@combined("backend, nranks, case", CANONICAL, NRANKS, BIG_CASES)
def test_millions_of_elements_wherever_each_rank_has_them(groups, backend, nranks, case):
    """Ranks need not agree on whose arrays lie in the group's memory."""
    owners, dtype, op = case
    shared = OWNERS[owners]

    def body(group):
        array = placed(group, values[group.rank], group.rank % 2 in shared)
        group.all_reduce(array, op)
        result = array.copy()
        chunk = group.reduce_scatter(placed(group, values[group.rank], group.rank % 2 in shared), op)
        return result, chunk

    values = [np.resize(sample(r, 1_000_003, dtype), BIG) for r in range(nranks)]
    expected = reduced(values, op)
    cuts = cuts_of(BIG, nranks)
    for rank, (array, chunk) in enumerate(groups.run(backend, nranks, body)):
        assert_same_bits(array, expected)
        assert_same_bits(chunk, expected[cuts[rank] : cuts[rank + 1]])
    groups.give_back(backend, nranks)


@pytest.mark.parametrize(("nranks", "each"), [(6, 3), (6, 2), (8, 2), (8, 4), (9, 3)])
def test_hosts_of_any_number_and_size_give_the_same_bits(monkeypatch, nranks, each):
    """As a hierarchy: sums that begin and end in the middle of a host, arrays that lie in shared memory or do not."""
    monkeypatch.setattr("tests.support.groups.hosts_of", lambda n: [f"host {rank // each}" for rank in range(n)])
    sizes = (0, 1, nranks - 1, 1009, 300_001)

    def body(group):
        results = []
        for shared in (False, True):
            for size in sizes:
                array = filled(group, size, "float32", shared and size % 2)
                group.all_reduce(array)
                results.append(array.copy())
            half = filled(group, 1009, "float16", shared)
            group.all_reduce(half)
            results.append(half.copy())
        array = filled(group, 300_001, "float32", group.rank % 3 == 0)
        chunk = group.reduce_scatter(array).copy()
        group.gather_chunks(array)
        roots = [sample(group.rank, 70_001, "float64", seed=root) for root in (0, nranks // 2, nranks - 1)]
        for root, values in zip((0, nranks // 2, nranks - 1), roots, strict=True):
            group.broadcast(values, root)
        return results, chunk, array, roots, group.all_gather(sample(group.rank, (3, 5), "int32"))

    def expected(size, dtype="float32"):
        return reduced([sample(r, size, dtype) for r in range(nranks)], "mean")

    right = [*map(expected, sizes), expected(1009, "float16")] * 2
    cuts = cuts_of(300_001, nranks)
    with opened("tcp-hierarchical", nranks) as every:
        assert {group.algorithm for group in every} == {"hierarchical"}
        for rank, (results, chunk, array, roots, stacked) in enumerate(on_ranks(every, body)):
            for result, values in zip(results, right, strict=True):
                assert_same_bits(result, values)
            assert_same_bits(chunk, expected(300_001)[cuts[rank] : cuts[rank + 1]])
            assert_same_bits(array, expected(300_001))
            for root, values in zip((0, nranks // 2, nranks - 1), roots, strict=True):
                assert_same_bits(values, sample(root, 70_001, "float64", seed=root))
            assert_same_bits(stacked, np.stack([sample(r, (3, 5), "int32") for r in range(nranks)]))
