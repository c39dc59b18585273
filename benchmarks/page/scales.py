"""Axes of charts: where a value lies on them, in percent of their length, and round values to label them with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Axis", "linear", "logarithmic", "round_values"]

LETTER = 3.3  # percent of an axis on a phone that one takes, with some air


@dataclass(frozen=True)
class Axis:
    """
    Args:
        low, high: its ends.
        ticks: values and what is written at them.
    """

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False

    def shows(self, value: float) -> bool:
        """Whether it has a place, be it outside the ends."""
        return math.isfinite(value) and (value > 0 or not self.is_log)

    def place(self, value: float) -> float:
        """In percent from the low end.

        >>> linear("", 0, 200).place(50), logarithmic("", 1, 100).place(10)
        (25.0, 50.0)
        """
        scale = math.log10 if self.is_log else float
        low, high, at = scale(self.low), scale(self.high), scale(value)
        return round(100 * (at - low) / (high - low), 2)

    def rows(self) -> list[tuple[float, str, bool]]:
        """Place, text and whether it stands a row lower on a narrow screen, where neighbours would touch.

        >>> [lower for *_, lower in logarithmic("", 1, 100, [(x, f"{x} MiB") for x in (1, 5, 10, 20, 100)]).rows()]
        [False, False, True, False, False]
        """
        found, ends = [], [-math.inf, -math.inf]  # where the upper row's labels end, and the lower one's
        for value, text in self.ticks:
            at, half = self.place(value), LETTER * len(text) / 2
            lower = at - half < ends[0] and ends[1] < ends[0]
            ends[lower] = at + half
            found.append((at, text, lower))
        return found


def linear(title: str, low: float, high: float) -> Axis:
    high = high if high > low else low + 1.0
    return Axis(title, low, high, [(value, f"{value:,g}") for value in round_values(low, high)])


def logarithmic(title: str, low: float, high: float, ticks: Sequence[tuple[float, str]] = ()) -> Axis:
    """Ticks at powers of ten, or where there are fewer than three, at 1, 2 and 5 times them."""
    if not low < high:
        low, high = low / 2, high * 2
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = {
        digits: [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
        for digits in ((1,), (1, 2, 5))
    }
    values = inside[(1,)] if len(inside[(1,)]) > 2 else inside[(1, 2, 5)]
    return Axis(title, low, high, ticks or [(value, f"{value:,g}") for value in values], is_log=True)


def round_values(low: float, high: float) -> list[float]:
    """Four to nine multiples of 1, 2 or 5 times a power of ten.

    >>> round_values(0, 1840)
    [0.0, 500.0, 1000.0, 1500.0]
    """
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(digit * power for digit in (5, 2, 1) if digit * power <= (high - low) / 3)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
