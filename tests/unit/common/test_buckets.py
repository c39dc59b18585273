"""The cuts of the flat buffers against tables written by hand, and what makes them right for any sizes."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tensors.buckets import ALIGNMENT, Bucket, align, chunk_bounds, pieces_of, plan_buckets, words

PLANS = {
    "nothing": ([], 0, 64, 64, []),
    "one parameter": ([0], 16, 64, 64, [(0, 16)]),
    "first limit just met": ([0, 16], 32, 128, 0, [(0, 32)]),
    "first limit exceeded by a byte": ([0, 16], 32, 127, 128, [(16, 32), (0, 16)]),
    "second limit for all but the first": ([0, 16, 32, 48, 64], 80, 64, 128, [(64, 80), (32, 64), (0, 32)]),
    "second limit exceeded by a byte": ([0, 16, 32], 48, 64, 127, [(32, 48), (16, 32), (0, 16)]),
    "the docstring's": ([0, 16, 48], 64, 64, 256, [(48, 64), (0, 48)]),
    "a large one in the middle": ([0, 16, 1024], 1040, 64, 256, [(1024, 1040), (16, 1024), (0, 16)]),
    "a large one last": ([0, 16], 1040, 64, 256, [(16, 1040), (0, 16)]),
    "a large one first": ([0, 1024, 1040], 1056, 64, 256, [(1040, 1056), (1024, 1040), (0, 1024)]),
}
CHUNKS = {
    (0, 1): [(0, 0)],
    (0, 3): [(0, 0), (0, 0), (0, 0)],
    (1, 1): [(0, 1)],
    (1, 3): [(0, 1), (1, 1), (1, 1)],
    (2, 3): [(0, 2), (2, 2), (2, 2)],
    (16, 2): [(0, 16), (16, 16)],
    (17, 2): [(0, 16), (16, 17)],
    (48, 2): [(0, 32), (32, 48)],
    (80, 4): [(0, 32), (32, 48), (48, 64), (64, 80)],
    (97, 7): [(0, 16), (16, 32), (32, 48), (48, 64), (64, 80), (80, 96), (96, 97)],
    (100, 3): [(0, 48), (48, 80), (80, 100)],
    (128, 4): [(0, 32), (32, 64), (64, 96), (96, 128)],
    (7919, 5): [(0, 1584), (1584, 3168), (3168, 4752), (4752, 6336), (6336, 7919)],
}
SIZES = st.lists(st.integers(1, 3000), max_size=40)  # of parameters, in elements
LIMITS = st.integers(0, 20_000)  # bytes


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 16), (15, 16), (16, 16), (17, 32), (97, 112)])
def test_align(count: int, expected: int) -> None:
    assert align(count) == expected


@pytest.mark.parametrize("name", PLANS)
def test_plan_table(name: str) -> None:
    starts, length, first, limit, expected = PLANS[name]
    plan = plan_buckets(starts, length, first_bytes=first, bucket_bytes=limit)
    assert plan == tuple(Bucket(start, stop, "float32") for start, stop in expected)


def test_plan_counts_bytes_not_elements() -> None:
    assert len(plan_buckets([0, 16], 32, first_bytes=128, bucket_bytes=128)) == 1
    assert len(plan_buckets([0, 16], 32, first_bytes=127, bucket_bytes=127)) == 2


def test_a_float64_takes_two_words_and_other_types_none() -> None:
    assert (words("float32"), words("float64")) == (1, 2)
    with pytest.raises(KeyError):
        words("float16")


def test_a_plan_tells_its_dtype_and_counts_words_alike() -> None:
    plans = [plan_buckets([0, 16, 48], 64, first_bytes=64, bucket_bytes=256, dtype=d) for d in ("float32", "float64")]
    assert [[(b.start, b.stop) for b in plan] for plan in plans] == 2 * [[(48, 64), (0, 48)]]
    assert [{b.dtype for b in plan} for plan in plans] == [{"float32"}, {"float64"}]


def test_default_limits_are_one_and_25_megabytes() -> None:
    megabyte = 250_000  # float32 elements
    starts = [i * megabyte for i in range(60)]
    assert [b.length // megabyte for b in plan_buckets(starts, 60 * megabyte)] == [1, 25, 25, 9]


def test_bucket_length() -> None:
    assert Bucket(16, 48).length == 32


def layout(sizes: list[int]) -> tuple[list[int], int]:
    ends = list(accumulate((align(size) for size in sizes), initial=0))
    return ends[:-1], ends[-1]


@given(SIZES, LIMITS, LIMITS)
def test_plan_covers_the_arena_once_from_its_end(sizes: list[int], first: int, limit: int) -> None:
    starts, length = layout(sizes)
    plan = plan_buckets(starts, length, first_bytes=first, bucket_bytes=limit)
    edges = [length, *(b.start for b in plan)]
    assert [b.stop for b in plan] == edges[:-1]
    assert edges[-1] == 0
    assert all(b.length > 0 for b in plan)


@given(SIZES, LIMITS, LIMITS)
def test_plan_cuts_between_parameters_only(sizes: list[int], first: int, limit: int) -> None:
    starts, length = layout(sizes)
    for bucket in plan_buckets(starts, length, first_bytes=first, bucket_bytes=limit):
        assert bucket.start in starts
        assert bucket.start % ALIGNMENT == 0


@given(SIZES, LIMITS, LIMITS)
def test_plan_keeps_the_limits_and_fills_them(sizes: list[int], first: int, limit: int) -> None:
    starts, length = layout(sizes)
    for i, bucket in enumerate(plan_buckets(starts, length, first_bytes=first, bucket_bytes=limit)):
        allowed = limit if i else first
        inside = [start for start in starts if bucket.start <= start < bucket.stop]
        assert len(inside) == 1 or 4 * bucket.length <= allowed
        before = [start for start in starts if start < bucket.start]
        assert not before or 4 * (bucket.stop - before[-1]) > allowed


@pytest.mark.parametrize(("length", "nranks"), CHUNKS)
def test_chunk_table(length: int, nranks: int) -> None:
    assert list(chunk_bounds(length, nranks)) == CHUNKS[length, nranks]


@given(st.integers(0, 10_000), st.integers(1, 17))
def test_chunks_cover_the_bucket_once_cut_at_cache_lines(length: int, nranks: int) -> None:
    bounds = chunk_bounds(length, nranks)
    assert len(bounds) == nranks
    assert (bounds[0][0], bounds[-1][1]) == (0, length)
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    assert all(stop % 16 == 0 or stop == length for _, stop in bounds)


@given(st.integers(0, 10_000), st.integers(1, 17))
def test_chunks_differ_by_one_unit_of_16_at_most(length: int, nranks: int) -> None:
    units = [align(stop - start) // 16 for start, stop in chunk_bounds(length, nranks)]
    assert max(units) - min(units) <= 1


@pytest.mark.parametrize(
    ("start", "stop", "limit", "expected"),
    [
        (0, 0, 5, []),
        (7, 7, 1, []),
        (0, 1, 5, [(0, 1)]),
        (0, 4, 5, [(0, 4)]),
        (0, 8, 4, [(0, 4), (4, 8)]),
        (3, 14, 4, [(3, 7), (7, 11), (11, 14)]),
        (5, 8, 1, [(5, 6), (6, 7), (7, 8)]),
    ],
)
def test_segment_table(start: int, stop: int, limit: int, expected: list[tuple[int, int]]) -> None:
    assert list(pieces_of(start, stop, limit)) == expected


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 700))
def test_segments_cover_a_run_once(start: int, length: int, limit: int) -> None:
    pieces = list(pieces_of(start, start + length, limit))
    assert [i for a, b in pieces for i in range(a, b)] == list(range(start, start + length))
    assert all(b - a == limit for a, b in pieces[:-1])
    assert all(0 < b - a <= limit for a, b in pieces)
