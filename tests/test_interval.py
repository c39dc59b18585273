"""The interval of a median: exactly what drawing every resample gives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.interval import interval


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7])
def test_it_is_what_every_resample_gives(n: int) -> None:
    values = [3.0 * i**2 for i in range(n)]
    draws = np.array([*itertools.product(values, repeat=n)])
    ordered = np.sort(draws, axis=1)
    lower, upper = ordered[:, (n - 1) // 2], ordered[:, n // 2]  # the two middle ones; one if n is odd
    low = np.quantile(lower, 0.025, method="inverted_cdf")
    high = -np.quantile(-upper, 0.025, method="inverted_cdf")
    assert interval(values[::-1]) == [low, high]
    assert (interval(values) == [values[0], values[-1]]) == (n <= 6)


def test_more_values_make_it_narrower() -> None:
    assert interval([*range(11)]) == [2, 8]
    low, high = interval([*range(101)])
    assert 38 <= low <= 42
    assert 58 <= high <= 62
