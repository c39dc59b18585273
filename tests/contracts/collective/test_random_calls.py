"""Random calls: every backend gives the bits of naive NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.tensors.buckets import chunk_bounds
from tests.support.collectives import CASES, NRANKS, PIECE, backends, filled, sizes_of
from tests.support.groups import BACKENDS, CANONICAL, assert_same_bits, reduced, sample
from tests.support.pairwise import combined
from tests.support.thorough import examples

EXAMPLES = examples(40, 200)


def check_random_all_reduce(groups, backend, nranks, size, case, seed):
    """Even seeds use the group's memory."""
    dtype, op = case

    def body(group):
        array = filled(group, size, dtype, seed % 2 == 0, seed=seed)
        group.all_reduce(array, op)
        return array

    expected = reduced([sample(r, size, dtype, seed=seed) for r in range(nranks)], op)
    for result in groups.run(backend, nranks, body):
        assert_same_bits(result, expected)


@combined("backend, nranks, size, shared", CANONICAL, [1, 2, 3, 4], [0, 1, 2, 47, 1009, 700_001], [True, False])
def test_scattered_chunks_are_gathered_to_an_all_reduce(groups, backend, nranks, size, shared):
    def body(group):
        array = filled(group, size, "float32", shared)
        group.reduce_scatter(array, "mean")
        group.gather_chunks(array)
        return array

    expected = reduced([sample(r, size, "float32") for r in range(nranks)], "mean")
    for result in groups.run(backend, nranks, body):
        assert_same_bits(result, expected)


@backends
def test_chunks_of_some_in_shared_memory_and_some_not_are_gathered(groups, backend):
    def body(group):
        array = filled(group, 300_000, "int64", group.rank == 1)[::2]
        mine = slice(*chunk_bounds(array.size, 3)[group.rank])
        kept = array[mine].copy()
        group.gather_chunks(array)
        return array, kept

    results = groups.run(backend, 3, body)
    expected = np.concatenate([kept for _, kept in results])
    for array, _ in results:
        assert_same_bits(array, expected)


random_calls = given(
    nranks=st.sampled_from(NRANKS),
    size=st.one_of(st.integers(0, 300), st.integers(1000, 5000), st.integers(PIECE - 20, 2 * PIECE)),
    case=st.sampled_from(CASES),
    seed=st.integers(0, 2**32),
)


@pytest.mark.again
@settings(max_examples=max(100, EXAMPLES), deadline=None)
@random_calls
def test_random_all_reduces_in_memory(groups, nranks, size, case, seed):
    check_random_all_reduce(groups, "memory", nranks, size, case, seed)


@pytest.mark.again
@pytest.mark.parametrize("backend", BACKENDS[1:])
@settings(max_examples=EXAMPLES, deadline=None)
@random_calls
def test_random_all_reduces(groups, backend, nranks, size, case, seed):
    check_random_all_reduce(groups, backend, nranks, size, case, seed)


def test_all_backends_give_the_same_bits(groups):
    def body(group):
        arrays = [sample(group.rank, size, dtype) for size in sizes_of(3) for dtype, _ in CASES]
        for array, (_, op) in zip(arrays, CASES * len(sizes_of(3)), strict=True):
            group.all_reduce(array, op)
        return b"".join(array.tobytes() for array in arrays)

    results = [result for backend in CANONICAL for result in groups.run(backend, 3, body)]
    assert len(results[0]) > 10**6
    assert set(results) == {results[0]}
