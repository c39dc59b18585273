"""Arrays of the group's memory that lie at the same place on all ranks: reduced in one call from the second time on,
with the same bits and errors, also when one of them lies elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from collective.shared_memory.in_place import IN_ONE_CALL
from common.errors import ProtocolError
from tests.support.groups import assert_same_bits, errors_on, on_ranks, opened, reduced, sample

SIZE = 40_001  # above what is short


def whole_calls(group):
    return group._algorithm._in_place._calls


def in_the_long_way(group):
    """What is not done in one call fails from now on."""

    def refuse(*_):
        raise AssertionError("not in one call")

    group._algorithm._in_place.reduce = refuse


@pytest.mark.parametrize(
    ("op", "dtype", "nranks"),
    [("mean", "float32", 2), ("sum", "float64", 3), ("max", "int64", 2), ("mean", "float32", 5)],
)
def test_the_second_time_it_is_one_call_with_the_same_bits(op, dtype, nranks):
    def body(group):
        array = group.empty(SIZE + 8, dtype)[8:]
        array[...] = sample(group.rank, SIZE, dtype)
        group.all_reduce(array, op)
        in_the_long_way(group)
        for seed in (1, 2, 3):
            array[...] = sample(group.rank, SIZE, dtype, seed=seed)
            group.all_reduce(array, op)
        return array

    with opened("shm", nranks) as groups:
        found = on_ranks(groups, body)
    expected = reduced([sample(rank, SIZE, dtype, seed=3) for rank in range(nranks)], op)
    for array in found:
        assert_same_bits(array, expected)


@pytest.mark.parametrize("moved", ["elsewhere", "within the group's memory", "out of it"])
def test_who_has_another_array_than_before_changes_nothing_but_the_way(moved):
    def body(group):
        memory = group.empty(3 * SIZE, np.float32)
        arrays = [memory[:SIZE], memory[SIZE : 2 * SIZE]]
        for array in [arrays[0], arrays[0]]:
            array[...] = sample(group.rank, SIZE, "float32")
            group.all_reduce(array, "sum")
        used = arrays[0]
        if group.rank == 1:
            used = {
                "elsewhere": group.empty(SIZE, np.float32),
                "within the group's memory": arrays[1],
                "out of it": np.empty(SIZE, np.float32),
            }[moved]
        out = []
        for seed, array in ((4, used), (5, arrays[0])):
            array[...] = sample(group.rank, SIZE, "float32", seed=seed)
            group.all_reduce(array, "sum")
            out.append(array.copy())
        return out

    with opened("shm", 3) as groups:
        found = on_ranks(groups, body)
    for i, seed in enumerate((4, 5)):
        expected = reduced([sample(rank, SIZE, "float32", seed=seed) for rank in range(3)], "sum")
        for arrays in found:
            assert_same_bits(arrays[i], expected)


def test_who_is_about_to_do_something_else_is_told():
    def body(group):
        array = group.empty(SIZE, np.float32)
        for _ in range(2):
            array[...] = 1
            group.all_reduce(array, "sum")
        group.all_reduce(array, "sum" if group.rank else "max")

    with opened("shm", 2) as groups:
        for error in errors_on(groups, body):
            assert isinstance(error, ProtocolError)


def test_large_ones_are_not():
    def body(group):
        array = group.empty(IN_ONE_CALL // 4 + 16, np.float32)
        array[...] = 1
        group.all_reduce(array, "sum")
        group.all_reduce(array, "sum")
        assert (array == 4).all()
        assert not whole_calls(group)

    with opened("shm", 2) as groups:
        on_ranks(groups, body)
