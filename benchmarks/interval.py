"""How sure a median is: its 95 % interval."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

__all__ = ["interval"]

TAIL = 0.025  # outside, on each side


def interval(values: Sequence[float]) -> list[float]:
    """[low, high] of the median by the percentile bootstrap (Efron 1979), exactly: no draws are needed for a median.

    A resample of n has a median of at most the k-th smallest value if at least half of its n draws are among the k
    smallest, which is binomial with k/n. With up to 6 values the interval is that from the least to the greatest.

    >>> interval([3, 1, 2]), interval([*range(11)])
    ([1, 3], [2, 8])
    """
    ordered, n = sorted(values), len(values)
    half = (n + 1) // 2
    k = next(k for k in range(1, n + 1) if _at_least(half, n, k / n) > TAIL)
    return [ordered[k - 1], ordered[n - k]]


def _at_least(least: int, draws: int, chance: float) -> float:
    """The probability of so many hits or more."""
    return sum(comb(draws, j) * chance**j * (1 - chance) ** (draws - j) for j in range(least, draws + 1))
