"""How the trainers of one server keep up with one another, and how much they send."""

from __future__ import annotations

from common.system.lateness import Lateness

__all__ = ["Pace"]

WINDOW = 1000  # steps over which the lag is the median


class Pace(Lateness):
    """Of `nranks` trainers; not thread-safe. Times are monotonic seconds, sizes bytes."""

    def __init__(self, nranks: int) -> None:
        super().__init__(nranks, window=WINDOW)
        self.steps = [0] * nranks  # committed
        self.pushed = [0] * nranks
        self.served = [0] * nranks
        self._first_of: dict[int, float] = {}  # when the first trainer ended a step that others have not

    def committed(self, rank: int, now: float) -> None:
        """A trainer has ended its part of a step: of its own step of that number, if trainers run apart."""
        step = self.steps[rank]
        self.steps[rank] += 1
        self._lags[rank].append(now - self._first_of.setdefault(step, now))
        if min(self.steps) > step:  # all have made it
            self.times_last[rank] += 1
            del self._first_of[step]

    def straggler(self) -> str:
        """Which trainer was last most often, in words; "" of one trainer, or before any step."""
        if len(self.steps) < 2 or not any(self.times_last):
            return ""
        rank = max(range(len(self.steps)), key=lambda r: self.times_last[r])
        share, lag = self.share_last(rank), self.lag(rank)
        return f"rank {rank} came last in {share:.0%} of the steps, {1000 * lag:.1f} ms after the first (median)"
