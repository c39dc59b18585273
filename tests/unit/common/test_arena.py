"""Where parameters lie in the flat buffers, and the digest that identifies them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tensors.arena import Arena, Layout, Slot, sha256_of_parameters
from common.tensors.buckets import Bucket, plan_buckets

SHAPES = [("a", (3,)), ("scalar", ()), ("full", (16,)), ("one more", (17,)), ("matrix", (2, 5))]
STARTS = [0, 16, 32, 48, 80]


def layout(*shapes: Sequence[int]) -> Layout:
    return Layout.of((f"p{i}", shape) for i, shape in enumerate(shapes))


def test_each_parameter_starts_on_a_cache_line() -> None:
    found = Layout.of(SHAPES)
    assert [(slot.name, slot.shape) for slot in found.slots] == SHAPES
    assert [slot.start for slot in found.slots] == STARTS
    assert [slot.size for slot in found.slots] == [3, 1, 16, 17, 10]
    assert [slot.stop for slot in found.slots] == [3, 17, 48, 65, 90]
    assert found.length == 96


def test_layout_of_nothing() -> None:
    assert Layout.of([]) == Layout((), 0)


def test_shapes_become_tuples_so_that_layouts_compare() -> None:
    assert layout([2, 3]) == layout((2, 3))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (layout((2, 3), (4,)), None),
        (layout((3, 2), (4,)), "parameter p0 [2, 3] against p0 [3, 2]"),
        (layout((2, 3), (5,)), "parameter p1 [4] against p1 [5]"),
        (layout((2, 3)), "2 parameters against 1"),
        (layout((2, 3), (4,), ()), "2 parameters against 3"),
        (layout(), "2 parameters against 0"),
        (Layout.of([("p0", (2, 3)), ("q", (4,))]), "parameter p1 [4] against q [4]"),
        (layout((2, 3)).then([("p1", (4,))], "float64"), "parameter p1 [4] against p1 [4] float64"),
        (Layout.of([("p0", (2, 3))], "float64"), "parameter p0 [2, 3] against p0 [2, 3] float64"),
        (Layout(layout((2, 3), (4,)).slots, 48), "arenas of 32 against 48 words"),
    ],
)
def test_difference_names_the_first_disagreement(other: Layout, expected: str | None) -> None:
    assert layout((2, 3), (4,)).difference(other) == expected


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 96, "a scalar full one more matrix"),
        (0, 0, ""),
        (0, 1, "a"),
        (3, 16, ""),  # padding only
        (16, 17, "scalar"),
        (2, 33, "a scalar full"),
        (47, 49, "full one more"),
        (48, 80, "one more"),
        (89, 200, "matrix"),
        (90, 96, ""),
    ],
)
def test_slots_between(start: int, stop: int, expected: str) -> None:
    assert " ".join(slot.name for slot in Layout.of(SHAPES).slots_between(start, stop)) == expected


@pytest.mark.parametrize("shapes", [[], [("a", (1,))], SHAPES])
def test_buffers_are_zero_aligned_and_separate(shapes: list[tuple[str, Sequence[int]]]) -> None:
    arena = Arena(Layout.of(shapes))
    for buffer in (arena.parameters, arena.gradients):
        assert buffer.dtype == np.float32
        assert buffer.shape == (arena.layout.length,)
        assert not buffer.any()
        assert buffer.size == 0 or buffer.ctypes.data % 64 == 0  # NumPy gives empty arrays any address
    assert not np.shares_memory(arena.parameters, arena.gradients)


def test_a_parameter_is_a_view_in_its_shape() -> None:
    arena = Arena(Layout.of(SHAPES))
    matrix = arena.layout.slots[-1]
    arena.parameter(matrix)[...] = np.arange(10).reshape(2, 5)
    assert arena.parameters.tolist() == 80 * [0] + list(range(10)) + 6 * [0]


def test_memory_comes_from_the_given_function() -> None:
    given: list[np.ndarray] = []

    def empty(count: int) -> np.ndarray:
        given.append(np.full(count, 5, np.float32))
        return given[-1]

    arena = Arena(layout((20,)), empty=empty)
    assert arena.parameters is given[0]
    assert arena.gradients is given[1]
    assert not given[0].any()


def test_buckets_are_planned_unless_given() -> None:
    assert Arena(layout((3,), (4,))).buckets == (Bucket(0, 32),)
    mine = (Bucket(16, 32), Bucket(0, 16))
    assert Arena(layout((3,), (4,)), buckets=mine).buckets == mine


def test_a_slot_knows_its_end() -> None:
    assert (Slot("w", (2, 3, 4), 32).size, Slot("w", (2, 3, 4), 32).stop) == (24, 56)


def test_digest_is_over_name_shape_type_and_bytes() -> None:
    weight = np.array([[1, 2], [3, 4]], np.float32)
    bias = np.array([5], np.float64)
    text = b"w|[2, 2]|<f4|" + weight.tobytes() + b"b|[1]|<f8|" + bias.tobytes()
    assert sha256_of_parameters([("w", weight), ("b", bias)]) == hashlib.sha256(text).hexdigest()


def test_digest_of_nothing() -> None:
    assert sha256_of_parameters([]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_digest_sees_every_difference() -> None:
    a, b = np.arange(6, dtype=np.float32), np.arange(6, 12, dtype=np.float32)
    changed = a.copy()
    changed[5] = np.nextafter(changed[5], 9, dtype=np.float32)
    variants = [
        [("a", a), ("b", b)],
        [("b", b), ("a", a)],
        [("a", a), ("c", b)],
        [("a", a.reshape(2, 3)), ("b", b)],
        [("a", a.view(np.int32)), ("b", b)],
        [("a", changed), ("b", b)],
        [("a", a)],
    ]
    assert len({sha256_of_parameters(named) for named in variants}) == len(variants)


def test_digest_ignores_strides() -> None:
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    fortran = np.asfortranarray(matrix)
    assert sha256_of_parameters([("m", matrix)]) == sha256_of_parameters([("m", fortran)])


# ---- two dtypes -------------------------------------------------------------------------------------------------

MIXED = Layout.of([("a", (3,)), ("b", (16,))]).then([("c", (2, 5)), ("d", ()), ("e", (8,))], "float64")


def test_another_dtype_follows_on_a_cache_line_and_takes_two_words_an_element() -> None:
    assert [slot.dtype for slot in MIXED.slots] == 2 * ["float32"] + 3 * ["float64"]
    assert [(slot.start, slot.size, slot.stop) for slot in MIXED.slots[2:]] == [(32, 10, 52), (64, 1, 66), (80, 8, 96)]
    assert MIXED.length == 96
    assert MIXED.slots[:2] == Layout.of([("a", (3,)), ("b", (16,))]).slots


def test_nothing_after_a_layout_is_the_layout() -> None:
    assert MIXED.then([], "float64") == MIXED
    assert Layout((), 0).then([], "float32") == Layout.of([])


def test_a_float64_parameter_is_a_view_in_its_shape_and_type() -> None:
    arena = Arena(MIXED)
    for slot in MIXED.slots:
        arena.parameter(slot)[...] = slot.start + 1 / 3
        arena.gradient(slot)[...] = 1e300 if slot.dtype == "float64" else 1e30
    for slot in MIXED.slots:
        assert arena.parameter(slot).shape == slot.shape
        assert (arena.parameter(slot) == np.dtype(slot.dtype).type(slot.start + 1 / 3)).all()
        assert arena.parameter(slot).ctypes.data == arena.parameters.ctypes.data + 4 * slot.start
        assert np.isfinite(arena.gradient(slot)).all()
    padding = np.ones(MIXED.length, bool)
    for slot in MIXED.slots:
        padding[slot.start : slot.stop] = False
    assert not arena.parameters[padding].any()


def test_a_difference_the_other_way_round_names_the_dtype_too() -> None:
    other = Layout.of([("a", (3,)), ("b", (16,)), ("c", (2, 5))])
    assert MIXED.difference(other) == "parameter c [2, 5] float64 against c [2, 5]"
    assert other.difference(MIXED) == "parameter c [2, 5] against c [2, 5] float64"
    assert MIXED.difference(MIXED) is None


def test_a_plan_of_two_dtypes() -> None:
    """From the end; each dtype's first bucket is small, for it is its own plan."""
    found = MIXED.plan(first_bytes=64, bucket_bytes=192)
    assert found == (
        Bucket(80, 96, "float64"),
        Bucket(32, 80, "float64"),
        Bucket(16, 32, "float32"),
        Bucket(0, 16, "float32"),
    )


runs = st.lists(
    st.tuples(st.sampled_from(["float32", "float64"]), st.lists(st.integers(1, 300), min_size=1, max_size=8)),
    max_size=4,
)


@given(runs, st.integers(0, 4000), st.integers(0, 4000))
def test_any_plan_covers_every_word_once_from_the_end_without_mixing_dtypes(
    sizes: list[tuple[str, list[int]]], first: int, limit: int
) -> None:
    whole = Layout((), 0)
    for number, (dtype, of_dtype) in enumerate(sizes):
        whole = whole.then([(f"p{number}.{i}", [size]) for i, size in enumerate(of_dtype)], dtype)
    plan = whole.plan(first_bytes=first, bucket_bytes=limit)
    assert [b.stop for b in plan] == [whole.length, *(b.start for b in plan)][: len(plan)]
    assert (plan[-1].start if plan else whole.length) == 0
    starts = {slot.start for slot in whole.slots}
    for bucket in plan:
        assert bucket.start in starts
        assert {slot.dtype for slot in whole.slots_between(bucket.start, bucket.stop)} == {bucket.dtype}
        inside = whole.slots_between(bucket.start, bucket.stop)
        assert len(inside) == 1 or 4 * bucket.length <= max(first, limit)


@given(st.lists(st.integers(1, 300), max_size=8), st.integers(0, 4000), st.integers(0, 4000))
def test_a_plan_of_one_dtype_is_that_of_its_starts(sizes: list[int], first: int, limit: int) -> None:
    for dtype in ("float32", "float64"):
        one = Layout.of([(f"p{i}", [size]) for i, size in enumerate(sizes)], dtype)
        starts = [slot.start for slot in one.slots]
        expected = plan_buckets(starts, one.length, first_bytes=first, bucket_bytes=limit, dtype=dtype)
        assert one.plan(first_bytes=first, bucket_bytes=limit) == expected


def test_an_arena_of_two_dtypes_is_planned_by_its_layout() -> None:
    assert Arena(MIXED).buckets == (Bucket(32, 96, "float64"), Bucket(0, 32, "float32"))
