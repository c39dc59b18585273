"""Who comes last, and how late: of processes that do the same thing over and over, each at its own time."""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["Lateness"]


class Lateness:
    """Of `nranks` ranks; not thread-safe. Times are monotonic seconds.

    Args:
        window: over how many of the last occasions medians and maxima are taken; None: over all.
    """

    def __init__(self, nranks: int, *, window: int | None = None) -> None:
        self.times_last = [0] * nranks
        self._lags: list[deque[float]] = [deque(maxlen=window) for _ in range(nranks)]
        self._first: float | None = None  # when the first rank came to the occasion under way

    def arrived(self, rank: int, now: float, *, last: bool) -> None:
        """A rank has come, later than those before it; the last of all."""
        self._first = now if self._first is None else self._first
        self._lags[rank].append(now - self._first)
        if last:
            self.times_last[rank] += 1
            self._first = None

    def lag(self, rank: int) -> float:
        """Median time from the first rank's arrival to this one's."""
        return median(self._lags[rank]) if self._lags[rank] else 0.0

    def longest(self, rank: int) -> float:
        """The longest time from the first rank's arrival to this one's."""
        return max(self._lags[rank], default=0.0)

    def share_last(self, rank: int) -> float:
        """In which part of the occasions the rank came last, 0..1."""
        return self.times_last[rank] / max(1, sum(self.times_last))
