"""Arrays that are not contiguous, special floats, float16."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.collectives import backends
from tests.support.groups import assert_same_bits, cuts_of, reduced, sample

STRIDED = {
    "step": lambda: np.zeros(40_013, "f4")[::2],
    "reversed": lambda: np.zeros(20_007, "f4")[::-1],
    "transposed": lambda: np.zeros((97, 203), "f4").T,
    "columns": lambda: np.zeros((203, 97), "f4")[:, 3:50],
    "short": lambda: np.zeros((5, 4), "f4").T,
    "Fortran": lambda: np.zeros((3, 4, 5), "f4", order="F"),
}


@backends
@pytest.mark.parametrize("kind", STRIDED)
def test_arrays_that_are_not_contiguous_are_reduced_too(groups, backend, kind):
    shape = STRIDED[kind]().shape

    def body(group):
        array = STRIDED[kind]()
        array[...] = sample(group.rank, shape, "float32")
        again = array.copy()  # contiguous
        group.all_reduce(array)
        chunk = group.reduce_scatter(again[::-1][::-1])
        group.broadcast(other := np.asfortranarray(sample(group.rank, shape, "float32")), 1)
        base = array.base if array.base is not None else array
        untouched = np.count_nonzero(base) - np.count_nonzero(array)
        return array, chunk, other, untouched

    expected = reduced([sample(r, shape, "float32") for r in range(3)], "mean")
    cuts = cuts_of(expected.size, 3)
    for rank, (array, chunk, other, untouched) in enumerate(groups.run(backend, 3, body)):
        assert_same_bits(array, expected)
        assert_same_bits(chunk, expected.reshape(-1)[cuts[rank] : cuts[rank + 1]])
        assert_same_bits(other, sample(1, shape, "float32"))
        assert untouched == 0


@backends
def test_parts_of_one_array_may_be_reduced_one_after_the_other(groups, backend):
    """As buckets are, back to back and without a barrier; what lies between them is left alone."""
    parts = [slice(1, 18), slice(32, 32), slice(64, 5000), slice(5003, 300_000)]

    def body(group):
        array = group.empty(300_001)
        array[...] = sample(group.rank, array.size, "float32")
        for step in range(3):
            for bucket, part in enumerate(parts):
                group.all_reduce(array[part], "mean", step=step, bucket=bucket)
        return array

    inputs = [sample(r, 300_001, "float32") for r in range(3)]
    for rank, result in enumerate(groups.run(backend, 3, body)):
        expected = inputs[rank].copy()
        for part in parts:
            arrays = [x[part] for x in inputs]
            for _ in range(3):
                arrays = [reduced(arrays, "mean")] * 3
            expected[part] = arrays[0]
        assert_same_bits(result, expected)


@backends
def test_special_floats_survive(groups, backend):
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, 3.4e38, 1.0], np.float32)

    def mine(rank):
        return np.tile(np.roll(special, rank), 7)

    def body(group):
        array = mine(group.rank)
        with np.errstate(all="ignore"):
            group.all_reduce(array, "sum")
        return array

    with np.errstate(all="ignore"):
        expected = reduced([mine(r) for r in range(3)], "sum")
    numbers = ~np.isnan(expected)  # the sign of a NaN is that of whichever operand the processor takes it from
    for result in groups.run(backend, 3, body):
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(np.signbit(result[numbers]), np.signbit(expected[numbers]))


@backends
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [97, 300_001])
def test_the_maximum_with_nan_is_nan(groups, backend, dtype, size):
    def body(group):
        array = sample(group.rank, size, dtype)
        array[group.rank :: 7] = np.nan
        array[5::7] = [-np.inf, np.inf, 1][group.rank]
        group.all_reduce(array, "max")
        return array

    expected = np.max([sample(r, size, dtype) for r in range(3)], axis=0)
    expected[5::7] = np.inf
    for r in range(3):
        expected[r::7] = np.nan
    for result in groups.run(backend, 3, body):
        np.testing.assert_array_equal(result, expected)


@backends
def test_float16_sums_round_once(groups, backend):
    """Rounded at every addition, 2048 + 1 + 1 would stay 2048; and 1/3 in float16 would be off."""
    values = [2048.0, 1.0, 1.0]

    def body(group):
        sums, means = np.full((2, 5000), values[group.rank], np.float16)
        group.all_reduce(sums, "sum")
        group.all_reduce(means, "mean")
        return sums, means

    for sums, means in groups.run(backend, 3, body):
        assert set(sums.tolist()) == {2050.0}
        assert set(means.tolist()) == {float(np.float16(np.float32(2050) * np.float32(1 / 3)))}
