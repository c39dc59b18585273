"""Messages on their way to one peer: which of those that wait is sent next."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

__all__ = ["Outbox"]

M = TypeVar("M")


class Outbox(Generic[M]):
    """Messages in the order in which they were put; some are made only when they are about to be sent. Thread-safe, for
    any number of writers and one reader, who iterates once.

    With `by_place` pieces of the arena that wait go by their place in it: one put later overtakes those further back,
    between any two messages. Other messages neither overtake nor are overtaken, so nothing waits for ever.
    """

    def __init__(self) -> None:
        self.by_place = False
        self._put: queue.SimpleQueue[tuple[int | None, Iterator[M] | None]] = queue.SimpleQueue()

    def put(self, messages: Iterable[M], *, at: int | None = None) -> None:
        """Send these, one after the other. `at`: they are pieces of the arena in ascending order, from this word on."""
        self._put.put((at if self.by_place else None, iter(messages)))

    def end(self) -> None:
        """Nothing follows."""
        self._put.put((None, None))

    def __iter__(self) -> Iterator[M]:
        # a heap: (the last entry that cannot be overtaken, place, the entry's number, what is left; None: the end)
        waiting: list[tuple[int, int, int, Iterator[M] | None]] = []
        count = fixed = 0
        while True:
            while not waiting or not self._put.empty():
                at, messages = self._put.get()
                count += 1
                if at is None:
                    fixed, at = count, -1
                heappush(waiting, (fixed, at, count, messages))
            messages = waiting[0][3]
            if messages is None:
                return
            message = next(messages, None)
            if message is None:
                heappop(waiting)
            else:
                yield message
