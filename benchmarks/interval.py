"""How sure a median is: where that of another such run would lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb

__all__ = ["in_words", "interval", "three_digits"]

OUTSIDE = 0.05  # of all cases, at most


def interval(values: Sequence[float]) -> list[float]:
    """[low, high]: from the k-th smallest value to the k-th largest, the narrowest such interval in which the median of
    as many further values lies in 95 % of all cases, whatever their distribution; if none is so wide, and so with up
    to 12 values, from the least to the greatest.

    >>> interval([3, 1, 2]), interval([*range(13)])
    ([1, 3], [1, 11])
    """
    ordered, n = sorted(values), len(values)
    k = 1
    while k < (n + 1) // 2 and 2 * _below(n, k + 1) <= OUTSIDE:
        k += 1
    return [ordered[k - 1], ordered[n - k]]


def in_words(limits: Sequence[float], show: Callable[[float], str]) -> str:
    """Of [low, high]: "1.9–2.1"; of what was measured once "?", for its noise is unknown."""
    low, high = limits
    return "?" if low == high else f"{show(low)}–{show(high)}"


def three_digits(value: float) -> str:
    """ "0.00691", "1.93", "2,080"."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _below(n: int, k: int) -> float:
    """The probability that the median of n further values is less than the k-th smallest of n: among the first of all
    2n there are then enough of the further ones before k of these. Of an even n the lower of the two in the middle."""
    half = (n + 1) // 2
    first = half + k - 1
    ways = sum(comb(first, j) * comb(2 * n - first, n - j) for j in range(half, min(first, n) + 1))
    return ways / comb(2 * n, n)
