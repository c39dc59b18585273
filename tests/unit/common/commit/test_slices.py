"""State of an optimizer, cut anew: whatever the cuts, it is the same state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.commit.slices import Slice, arrays_of, cut, slices_in
from common.tensors.buckets import chunk_bounds


def state(length: int) -> Slice:
    values = np.arange(length, dtype=np.float32)
    return Slice(0, length, {"moment_0": values, "beta1_pow_acc_0": np.float32([0.9])})


def shares(whole: Slice, count: int) -> list[Slice]:
    return [cut([whole], start, stop) for start, stop in chunk_bounds(whole.stop, count) if start < stop]


@given(st.integers(1, 20).map(lambda lines: 16 * lines), st.integers(1, 8), st.integers(1, 8))
def test_state_of_any_number_of_servers_is_that_of_any_other(length: int, before: int, after: int) -> None:
    whole = state(length)
    kept = slices_in({name: array for share in shares(whole, before) for name, array in arrays_of([share]).items()})
    again = cut([cut(kept[::-1], share.start, share.stop) for share in shares(whole, after)], 0, length)
    for kind, array in whole.arrays.items():
        assert (again.arrays[kind] == array).all()
        assert again.arrays[kind].shape == array.shape


def test_what_keeps_no_state_has_none() -> None:
    assert cut([], 0, 64) == Slice(0, 64, {})
    assert cut([Slice(0, 64, {})], 16, 32) == Slice(16, 32, {})


@pytest.mark.parametrize("gone", range(3))
def test_a_gap_is_found(gone: int) -> None:
    kept = shares(state(96), 3)
    del kept[gone]
    with pytest.raises(ValueError, match=rf"words {32 * gone}\.\.{32 * gone + 32} are missing"):
        cut(kept, 0, 96)


def test_kinds_that_differ_are_found() -> None:
    with pytest.raises(ValueError, match="missing"):
        cut([Slice(0, 16, {"a": np.zeros(16)}), Slice(16, 32, {"b": np.zeros(16)})], 0, 32)
