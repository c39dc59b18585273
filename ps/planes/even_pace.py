"""Keeps trainers that share a server's link at about the same place of a step, by not reading from who is ahead.

What all have sent can be updated, and its results be on their way while the rest still arrives. Streams that share a
link seldom get equal parts of it by themselves: then most results would leave only when the slowest ends. TCP holds up
the sender whom nobody reads from, and the others get its part of the link. It also keeps the server's memory small.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["NEAR_AHEAD_BYTES", "EvenPace"]

AHEAD_BYTES = 1 << 19  # that a trainer may have sent more than the slowest, over a link that they share
NEAR_AHEAD_BYTES = 1 << 25  # likewise on one host, where only the server's memory is shared: hardly anyone is held up
PATIENCE_S = 1.0  # if the slowest sends nothing for so long, nobody is held up for it: it may be at fault, to be named


class EvenPace:
    """Of those trainers of a server that have a seat here; thread-safe.

    Args:
        clock: tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._sent: dict[int, int] = {}  # bytes, by rank
        self._ahead: dict[int, int] = {}  # that it may have sent more than the slowest
        self._held: dict[int, Callable[[], None]] = {}  # by which those are woken who are not read from
        self._least, self._moved_at = 0, clock()

    def seat(self, rank: int, ahead: int | None = None) -> None:
        """From now on this trainer counts; it may have sent so many bytes more than the slowest (None: AHEAD_BYTES)."""
        with self._lock:
            self._sent[rank], self._ahead[rank] = 0, AHEAD_BYTES if ahead is None else ahead
            self._least = 0

    def may_send(self, rank: int, wake: Callable[[], None]) -> bool:
        """Whether a trainer is to be read from; if not, `wake` is called when it is."""
        with self._lock:
            if self._is_ahead(rank) and self._clock() < self._moved_at + PATIENCE_S:
                self._held[rank] = wake
                return False
            return True

    def has_sent(self, rank: int, nbytes: int) -> None:
        """A trainer has sent so much more."""
        with self._lock:
            self._sent[rank] += nbytes
            least = min(self._sent.values())
            if least == self._least:
                return
            self._least, self._moved_at = least, self._clock()
            free = [rank for rank in self._held if not self._is_ahead(rank)]
            for each in free:
                self._held.pop(each)()

    def _is_ahead(self, rank: int) -> bool:
        return self._sent[rank] - self._least > self._ahead[rank]
