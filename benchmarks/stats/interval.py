"""How sure a median is: where that of another such run would lie, and which of two is the lower beyond noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

__all__ = ["LEAST_ROUNDS", "Measured", "are_paired", "chance", "in_words", "interval", "measured", "three_digits"]

OUTSIDE = 0.05  # of all cases, at most
BY_CHANCE = 0.02  # likewise, in which the sign test tells two equals apart
LEAST_LEAD = 0.01  # of less nobody would make anything
LEAST_ROUNDS = 3  # of two rounds each, two equals look apart in 1 of 3 cases


@dataclass(frozen=True)
class Measured:
    """A figure that several rounds were measured for: median, interval, and the values in the order of the rounds,
    where they are known."""

    median: float
    low: float
    high: float
    rounds: tuple[float, ...] = ()

    def against(self, other: Measured, *, same_rounds: bool = True) -> int:
        """-1 if this is the lower beyond noise, 1 if the higher, 0 if the difference is within noise.

        Of seven rounds or more that both were measured in: by a sign test over the rounds (two-sided, 2 %), and by a
        difference of 1 % at least. Whatever changes from one round to another, such as the machine's speed, has then no
        part in it. Otherwise by whether their intervals overlap.
        """
        if not same_rounds or not are_paired(self, other):
            return (self.low > other.high) - (self.high < other.low)
        needed = needed_of(len(self.rounds))
        pairs = list(zip(self.rounds, other.rounds, strict=True))
        lower, higher = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
        enough = 1 + LEAST_LEAD
        return (higher >= needed and self.median >= enough * other.median) - (
            lower >= needed and self.median * enough <= other.median
        )


def measured(record: Mapping[str, Any], name: str) -> Measured:
    """Of one of the entries in a file of results. Older ones do not hold the values of the rounds."""
    low, high = record[f"{name}_interval"]
    return Measured(record[name], low, high, tuple(record.get(f"{name}_rounds", ())))


def are_paired(*figures: Measured) -> bool:
    """Whether a sign test over their rounds can tell them apart."""
    counts = {len(figure.rounds) for figure in figures}
    return len(counts) == 1 and needed_of(*counts) <= min(counts)


def chance(count: int, *, paired: bool) -> float:
    """In which share of all cases, at most, two equals look apart that were measured in so many rounds, if these are
    independent: by the sign test, or because their ranges do not overlap, as in two of C(2n, n) orders of their values.

    >>> [round(1 / chance(count, paired=False)) for count in (2, 3, 5)], round(1 / chance(7, paired=True))
    ([3, 10, 126], 64)
    """
    return _agree(count, needed_of(count)) if paired else 2 / comb(2 * count, count)


def needed_of(count: int) -> int:
    """In how many of so many rounds one of two must be the lower, to be so beyond noise; with fewer than 7 rounds more
    than there are.

    >>> [needed_of(count) for count in (5, 6, 7, 9, 12)]
    [6, 7, 7, 9, 11]
    """
    needed = count + 1
    while needed - 1 > count / 2 and _agree(count, needed - 1) <= BY_CHANCE:
        needed -= 1
    return needed


def _agree(count: int, needed: int) -> float:
    """The probability that of so many tosses of a coin this many or more fall the same way."""
    return 2 * sum(comb(count, heads) for heads in range(needed, count + 1)) / (1 << count)


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
