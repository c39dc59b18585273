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


@pytest.mark.parametrize(("n", "expected"), [(9, [1, 7]), (13, [3, 9]), (19, [5, 13]), (39, [13, 25])])
def test_it_is_what_many_resamples_give(n: int, expected: list[float]) -> None:
    draws = np.random.default_rng(1).integers(0, n, (50_000, n))
    medians = np.median(draws, axis=1)
    assert [*np.quantile(medians, [0.025, 0.975], method="inverted_cdf")] == expected
    assert interval([*range(n)]) == expected
