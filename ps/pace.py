"""How the trainers of one server keep up with one another, and how much they send."""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["Pace"]

WINDOW = 1000  # steps over which the lag is the median


class Pace:
    """Of `nranks` trainers; not thread-safe. Times are monotonic seconds, sizes bytes."""

    def __init__(self, nranks: int) -> None:
        self.steps = [0] * nranks  # committed
        self.times_last = [0] * nranks
        self.pushed = [0] * nranks
        self.served = [0] * nranks
        self._lags: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(nranks)]
        self._first: float | None = None  # when the first trainer committed the step under way

    def committed(self, rank: int, now: float, *, last: bool) -> None:
        """A trainer has ended its part of a step, the last of all."""
        self._first = now if self._first is None else self._first
        self.steps[rank] += 1
        self._lags[rank].append(now - self._first)
        if last:
            self.times_last[rank] += 1
            self._first = None

    def lag(self, rank: int) -> float:
        """Median time from the first trainer's commit to this one's, over the last steps."""
        return median(self._lags[rank]) if self._lags[rank] else 0.0

    def straggler(self) -> str:
        """Which trainer was last most often, in words; "" of one trainer, or before any step."""
        steps = sum(self.times_last)
        if len(self.steps) < 2 or not steps:
            return ""
        rank = max(range(len(self.steps)), key=lambda r: self.times_last[r])
        share, lag = self.times_last[rank] / steps, self.lag(rank)
        return f"rank {rank} came last in {share:.0%} of the steps, {1000 * lag:.1f} ms after the first (median)"
