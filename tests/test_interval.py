"""The interval of a median: that of another such run lies in it, as often as is said."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.interval import in_words, interval


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 12])
def test_with_few_values_it_is_from_the_least_to_the_greatest(n: int) -> None:
    values = [3.0 * i**2 for i in range(n)]
    assert interval(values[::-1]) == [values[0], values[-1]]


@pytest.mark.parametrize("n", [13, 15, 21, 40])
def test_it_is_the_narrowest_that_holds_the_median_of_as_many_further_values(n: int) -> None:
    low, high = interval([*range(n)])
    assert low > 0
    assert low + high == n - 1
    drawn = np.random.default_rng(n).random((2, 40_000, n))
    ordered, middle = np.sort(drawn[0], axis=1), np.sort(drawn[1], axis=1)[:, (n - 1) // 2]
    below, narrower = ((middle < ordered[:, int(k)]).mean() for k in (low, low + 1))
    assert 2 * below < 0.052
    assert 2 * narrower > 0.048


@pytest.mark.parametrize(("n", "share"), [(3, 0.6), (5, 0.833), (7, 0.930)])
def test_how_often_few_values_hold_it(n: int, share: float) -> None:
    """Of all orders in which two runs of n can come, as docs/methodology.md tells."""
    inside = total = 0
    for mine in itertools.combinations(range(2 * n), n):
        theirs = sorted(set(range(2 * n)) - set(mine))
        low, high = interval(mine)
        inside += low < theirs[n // 2] < high
        total += 1
    assert inside / total == pytest.approx(share, abs=5e-4)


def test_what_was_measured_once_has_no_interval() -> None:
    assert in_words([1.0, 2.5], "{:.1f}".format) == "1.0–2.5"
    assert in_words([2.0, 2.0], "{:.1f}".format) == "?"
