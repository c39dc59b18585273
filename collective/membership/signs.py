"""What a rank of a large group knows of all others: which have given a sign of life lately, who waits, who has left.

Nobody asks all others there. While somebody waits for long, every rank passes on to those it is connected with, now and
again, all it knows; what is newer is kept. A rank's count goes up each time it passes something on, so that what is old
stays old however often it is told.

    who waits     is awake for HOPS steps from itself: who hears of it is so for one step less, and so on
    who is awake  counts itself up and passes on all it knows, once each period
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from common.errors import ProtocolError

__all__ = ["Signs", "Told"]

AWAKE_PERIODS = 2.5  # after the last word of who waits
Count = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]


class Told(Struct, frozen=True, array_like=True):
    """One rank's knowledge, by rank."""

    counts: list[Count]
    waited: list[Annotated[float, Meta(ge=0)]]  # for how many seconds, when it counted so; 0: it does not wait
    left: list[Count]  # ranks whose training is complete
    hops: Count  # how far it is to be passed on


class Signs:
    """Knows no socket and no clock. Times are monotonic seconds.

    Args:
        period: between two times that something is passed on, seconds.
    """

    def __init__(self, rank: int, nranks: int, period: float) -> None:
        self.rank, self.nranks, self.period = rank, nranks, period
        self.hops = nranks.bit_length()  # from one rank to any other, at most
        self._counts = np.zeros(nranks, np.int64)
        self._waited = np.zeros(nranks)
        self._heard_at = np.full(nranks, -math.inf)
        self.left: set[int] = set()
        self._hops, self._awake_until = 0, -math.inf
        self._told_at = -math.inf

    def of(self, rank: int) -> tuple[float, float]:
        """(when it was heard of last, for how many seconds it had waited then)."""
        return float(self._heard_at[rank]), float(self._waited[rank])

    def wake(self, now: float) -> bool:
        """This rank waits; whether it was asleep."""
        return self._wake(self.hops, now)

    def due(self, now: float) -> float:
        """In how many seconds this rank should pass on what it knows; infinite if nobody waits."""
        return max(0.0, self._told_at + self.period - now) if now < self._awake_until else math.inf

    def tell(self, waited: float, now: float) -> dict[str, Any]:
        """What to pass on now."""
        self._told_at = now
        self._counts[self.rank] += 1
        self._waited[self.rank] = waited
        return {"signs": [self._counts.tolist(), self._waited.round(3).tolist(), sorted(self.left), self._hops]}

    def hear(self, told: Told, now: float) -> bool:
        """Keep what is newer; whether this rank was asleep and is now awake.

        Raises:
            ProtocolError: that is of another group.
        """
        if not len(told.counts) == len(told.waited) == self.nranks or any(r >= self.nranks for r in told.left):
            raise ProtocolError(f"it told of {len(told.counts)} ranks, there are {self.nranks}")
        counts = np.array(told.counts, np.int64)
        newer = counts > self._counts
        newer[self.rank] = False
        self._counts[newer] = counts[newer]
        self._waited[newer] = np.array(told.waited)[newer]
        self._heard_at[newer] = now
        self.left.update(told.left)
        return told.hops > 0 and self._wake(told.hops - 1, now)

    def _wake(self, hops: int, now: float) -> bool:
        slept = now >= self._awake_until
        if slept or hops >= self._hops:
            self._hops, self._awake_until = hops, now + AWAKE_PERIODS * self.period
        return slept
