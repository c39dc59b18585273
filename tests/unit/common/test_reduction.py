"""The canonical sum, bit for bit, against a plain loop over ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tensors.buckets import pieces_of
from common.tensors.canonical_order import canonical_ranks, chunk_with, runs_of_chunks
from common.tensors.reduction import (
    BLOCK,
    DTYPES,
    OPS,
    Reduction,
    mean_scale,
    piece_reducer,
    reduce_bucket,
    reduce_piece,
)

ORDERS = {
    1: [(0,)],
    2: [(1, 0), (0, 1)],
    3: [(1, 2, 0), (2, 0, 1), (0, 1, 2)],
    4: [(1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2), (0, 1, 2, 3)],
}
LENGTHS = st.sampled_from([0, 1, 15, 16, 17, 97, 127, 128, 160, 251]) | st.integers(0, 300)
PADDING = 32  # elements of other buckets before and after


def gradients_of(nranks: int, length: int, dtype: str = "float32", *, seed: int = 0) -> list[np.ndarray]:
    """One array a rank, in arena positions, whose sums depend on the order of summation."""
    rng = np.random.default_rng([seed, nranks, length])
    shape = (nranks, PADDING + length + PADDING)
    return list((rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 5, shape)).astype(dtype))


def naive_mean(sources: list[np.ndarray], length: int) -> np.ndarray:
    """Element by element: unit u of U (16 elements each) is in chunk floor(u N / U), summed from its rank + 1 on."""
    nranks, units = len(sources), -(-length // 16)
    out = np.empty(length, sources[0].dtype)
    for e in range(length):
        chunk = e // 16 * nranks // units
        total = sources[(chunk + 1) % nranks][PADDING + e]
        for i in range(2, nranks + 1):
            total = total + sources[(chunk + i) % nranks][PADDING + e]
        out[e] = total * out.dtype.type(1 / nranks)
    return out


def reduce_whole(sources: list[np.ndarray], out: np.ndarray, length: int) -> None:
    reduce_bucket(sources, out, bucket_start=PADDING, bucket_length=length, start=PADDING, stop=PADDING + length)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("nranks", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 16, 100, 257])
def test_pieces_have_the_bits_of_the_whole(length: int, nranks: int, dtype: str) -> None:
    sources = gradients_of(nranks, length, dtype)
    expected = naive_mean(sources, length)
    for a, b in pieces_of(0, length, 48):
        out = np.empty(b - a, dtype)
        reduce_piece(sources, out, bucket_start=PADDING, bucket_length=length, start=PADDING + a, stop=PADDING + b)
        assert same_bits(out, expected[a:b])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("nranks", [1, 2, 3, 5])
def test_a_piece_whose_sources_stay_has_these_bits_each_time(nranks: int, dtype: str) -> None:
    length, a, b = 257, 48, 200
    sources = gradients_of(nranks, length, dtype)
    run = {"bucket_start": PADDING, "bucket_length": length, "start": PADDING + a, "stop": PADDING + b}
    reduce = piece_reducer(sources, **run)
    for seed in range(2):
        for source, values in zip(sources, gradients_of(nranks, length, dtype, seed=seed), strict=True):
            source[...] = values
        out = np.empty(b - a, dtype)
        reduce(out)
        assert same_bits(out, naive_mean(sources, length)[a:b])


@pytest.mark.parametrize("nranks", ORDERS)
def test_order_table(nranks: int) -> None:
    assert [canonical_ranks(chunk, nranks) for chunk in range(nranks)] == ORDERS[nranks]


@pytest.mark.parametrize("nranks", ORDERS)
def test_a_chunk_is_found_by_a_rank_and_its_place(nranks: int) -> None:
    for chunk, order in enumerate(ORDERS[nranks]):
        assert [chunk_with(rank, place, nranks) for place, rank in enumerate(order)] == [chunk] * nranks


def test_chunks_of_which_nothing_is_wanted_are_left_out() -> None:
    assert list(runs_of_chunks(0, 32, 3, 16, 32)) == [((2, 0, 1), 16, 32)]


@pytest.mark.parametrize(("nranks", "bits"), [(1, 0x3F800000), (2, 0x3F000000), (3, 0x3EAAAAAB), (10, 0x3DCCCCCD)])
def test_scale_is_rounded_once_to_float32(nranks: int, bits: int) -> None:
    scale = mean_scale(nranks, np.float32)
    assert isinstance(scale, np.float32)
    assert int(scale.view(np.uint32)) == bits


def test_scale_of_float64_keeps_its_precision() -> None:
    assert mean_scale(3, "float64") == 1 / 3
    assert isinstance(mean_scale(3, "float64"), np.float64)


def test_each_chunk_starts_at_its_own_rank() -> None:
    big = np.float32(1e8)  # swallows 1 when added first
    sources = [np.full(48, value, np.float32) for value in (big, 1, -big)]
    out = np.empty(48, np.float32)
    reduce_bucket(sources, out, bucket_start=0, bucket_length=48, start=0, stop=48)
    third = float(np.float32(1 / 3))
    assert out.tolist() == 16 * [0.0] + 16 * [third] + 16 * [0.0]


@given(st.integers(1, 5), LENGTHS, st.sampled_from(["float32", "float64"]), st.integers(0, 99))
def test_equals_the_naive_loop(nranks: int, length: int, dtype: str, seed: int) -> None:
    sources = gradients_of(nranks, length, dtype, seed=seed)
    out = np.full_like(sources[0], 7)
    reduce_whole(sources, out, length)
    assert same_bits(out[PADDING : PADDING + length], naive_mean(sources, length))
    assert (out[:PADDING] == 7).all()
    assert (out[PADDING + length :] == 7).all()


@given(st.integers(1, 5), LENGTHS, st.data())
def test_out_may_be_any_source(nranks: int, length: int, data: st.DataObject) -> None:
    sources = gradients_of(nranks, length)
    expected = naive_mean(sources, length)
    out = sources[data.draw(st.integers(0, nranks - 1))]
    untouched = [source.copy() for source in sources if source is not out]
    reduce_whole(sources, out, length)
    assert same_bits(out[PADDING : PADDING + length], expected)
    assert all(same_bits(a, b) for a, b in zip(untouched, (s for s in sources if s is not out), strict=True))


@given(st.integers(1, 5), LENGTHS, st.lists(st.integers(0, 300), max_size=6))
def test_parts_equal_the_whole(nranks: int, length: int, cuts: list[int]) -> None:
    sources = gradients_of(nranks, length)
    out = np.full_like(sources[0], 7)
    edges = [0, *sorted(min(cut, length) for cut in cuts), length]
    for a, b in pairwise(edges):
        reduce_bucket(sources, out, bucket_start=PADDING, bucket_length=length, start=PADDING + a, stop=PADDING + b)
    assert same_bits(out[PADDING : PADDING + length], naive_mean(sources, length))
    assert (out[:PADDING] == 7).all()
    assert (out[PADDING + length :] == 7).all()


@given(st.integers(1, 5), LENGTHS, st.data())
def test_a_part_touches_nothing_else(nranks: int, length: int, data: st.DataObject) -> None:
    sources = gradients_of(nranks, length)
    out = np.full_like(sources[0], 7)
    a, b = sorted(data.draw(st.tuples(st.integers(0, length), st.integers(0, length))))
    reduce_bucket(sources, out, bucket_start=PADDING, bucket_length=length, start=PADDING + a, stop=PADDING + b)
    expected = np.full_like(out, 7)
    expected[PADDING + a : PADDING + b] = naive_mean(sources, length)[a:b]
    assert same_bits(out, expected)


def test_a_range_wider_than_the_bucket_touches_only_the_bucket() -> None:
    sources = gradients_of(3, 97)
    out = np.full_like(sources[0], 7)
    reduce_bucket(sources, out, bucket_start=PADDING, bucket_length=97, start=0, stop=out.size)
    assert same_bits(out[PADDING : PADDING + 97], naive_mean(sources, 97))
    assert (out[:PADDING] == 7).all()
    assert (out[PADDING + 97 :] == 7).all()


@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_many_blocks_equal_one_vectorised_sum(nranks: int) -> None:
    length = 2 * BLOCK * nranks + 101
    sources = gradients_of(nranks, length)
    element = np.arange(length)
    chunk = element // 16 * nranks // -(-length // 16)
    table = np.stack(sources)[:, PADDING:]
    total = table[(chunk + 1) % nranks, element]
    for i in range(2, nranks + 1):
        total = total + table[(chunk + i) % nranks, element]
    reduce_whole(sources, sources[-1], length)
    assert same_bits(sources[-1][PADDING : PADDING + length], total * np.float32(1 / nranks))


def test_many_blocks_of_what_is_summed_in_another_type() -> None:
    inputs = [(np.arange(2 * BLOCK + 101) % k).astype(np.float16) for k in (7, 11)]
    expected = inputs[0] + inputs[1]
    Reduction.of("sum", np.dtype(np.float16), 2).reduce(inputs, inputs[1:])
    assert same_bits(inputs[1], expected)


def test_not_a_number_and_infinity_come_through() -> None:
    sources = [np.zeros(4, np.float32), np.array([np.nan, np.inf, -np.inf, 1], np.float32)]
    out = np.empty(4, np.float32)
    reduce_bucket(sources, out, bucket_start=0, bucket_length=4, start=0, stop=4)
    np.testing.assert_array_equal(out, [np.nan, np.inf, -np.inf, 0.5])


CASES = [(op, dtype) for op in OPS for dtype in DTYPES if op != "mean" or dtype.startswith("float")]


def values_of(nranks: int, dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(nranks)
    if dtype.startswith("float"):
        return [(rng.standard_normal(1009) * 2.0 ** rng.integers(-9, 9, 1009)).astype(dtype) for _ in range(nranks)]
    limits = np.iinfo(dtype)
    return [rng.integers(limits.min, limits.max, 1009, dtype, endpoint=True) for _ in range(nranks)]


@pytest.mark.parametrize("nranks", [2, 3, 7])
@pytest.mark.parametrize(("op", "dtype"), CASES)
@pytest.mark.parametrize("where", ["apart", "first input", "last input", "apart and last input", "all inputs"])
def test_reduce_goes_through_the_inputs_in_order(where: str, op: str, dtype: str, nranks: int) -> None:
    inputs = values_of(nranks, dtype)
    wide = np.dtype(np.float32) if dtype == "float16" else np.dtype(dtype)
    total = inputs[0].astype(wide)
    for values in inputs[1:]:
        total = np.maximum(total, values.astype(wide)) if op == "max" else total + values.astype(wide)
    if op == "mean":
        total = total * wide.type(1 / nranks)
    apart = [np.zeros(1009, dtype) for _ in range(3)]
    outputs = {
        "apart": apart,
        "first input": [inputs[0], *apart],
        "last input": inputs[-1:],
        "apart and last input": [apart[0], inputs[-1]],
        "all inputs": inputs,
    }[where]
    reduction = Reduction.of(op, np.dtype(dtype), nranks)
    if nranks == 3:  # compiled; the others are too short for that
        reduction.prepared(inputs, outputs)()
    else:
        reduction.reduce(inputs, outputs)
    assert all(same_bits(out, total.astype(dtype)) for out in outputs)


def test_every_dtype_and_op_has_its_own_number_and_object() -> None:
    every = [Reduction.of(op, np.dtype(dtype), 3) for op, dtype in CASES]
    assert len({reduction.number for reduction in every}) == len(CASES)
    assert all(Reduction.of(op, np.dtype(dtype), 3) is kept for (op, dtype), kept in zip(CASES, every, strict=True))


@pytest.mark.parametrize(
    ("op", "dtype", "error"),
    [("min", "f4", ValueError), ("mean", "i4", ValueError), ("sum", "u1", TypeError), ("sum", ">f4", TypeError)],
)
def test_what_cannot_be_reduced_is_refused(op: str, dtype: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"\(got "):
        Reduction.of(op, np.dtype(dtype), 3)
