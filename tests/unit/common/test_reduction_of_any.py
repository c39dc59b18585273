"""Reductions beside gradients': bfloat16 as Paddle rounds it, what overflows, means of integers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from common.tensors.reduction_of_any import BFLOAT16, reduce_in_order


def reduced(sources: list[np.ndarray], op: str) -> np.ndarray:
    out = np.empty_like(sources[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reduce_in_order(sources, out, op, start=0, total=out.size)
    return out


def bits(*values: float) -> np.ndarray:
    return (np.array(values, np.float32).view(np.uint32) >> 16).astype(BFLOAT16)


def test_bfloat16_is_rounded_once_to_the_nearest_ties_to_even() -> None:
    one, ulp = bits(1.0, 1.0, 1.0, 2.0, np.nan, np.inf, -np.inf), 2.0**-7
    small = bits(ulp / 2, ulp / 2 * 1.5, -ulp / 4 * 1.5, ulp * 3, 1.0, 1.0, np.inf)
    got = (reduced([one, small], "sum").astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(got, np.array([1.0, 1 + ulp, 1 - ulp / 2, 2 + 4 * ulp, np.nan, np.inf, np.nan], "f4"))
    assert reduced([bits(3.3e38), bits(3.3e38)], "sum")[0] == bits(np.inf)[0]


def test_what_overflows_does_so_in_silence() -> None:
    large = np.array([3e38, 1.0], np.float32)
    assert reduced([large, large], "sum").tolist() == [np.inf, 2.0]
    assert reduced([np.array([100], np.int8)] * 2, "sum").tolist() == [-56]
    assert reduced([np.array([60000], np.float16)] * 2, "prod").tolist() == [np.inf]


@pytest.mark.parametrize(("values", "mean"), [((7, 0), 3), ((-7, 0), -3), ((-8, 0), -4), ((100, 100), -28)])
def test_the_mean_of_integers_is_rounded_towards_zero(values: tuple[int, int], mean: int) -> None:
    assert reduced([np.array([v], np.int8) for v in values], "mean").tolist() == [mean]
