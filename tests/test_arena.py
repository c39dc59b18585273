"""Where parameters lie in the flat buffers, and the digest that identifies them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest

from common.arena import Arena, Layout, Slot, sha256_of_parameters
from common.buckets import Bucket

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
