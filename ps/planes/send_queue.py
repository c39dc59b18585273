"""Messages on their way to one peer, made only when they are about to be sent."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["SendQueue"]

M = TypeVar("M")


class SendQueue(Generic[M]):
    """Messages in the order in which they were put; some are made only when they are about to be sent. Thread-safe, for
    any number of writers and one reader, who iterates once."""

    def __init__(self) -> None:
        self._put: queue.SimpleQueue[Iterable[M] | None] = queue.SimpleQueue()

    def put(self, messages: Iterable[M]) -> None:
        """Send these, one after the other."""
        self._put.put(messages)

    def end(self) -> None:
        """Nothing follows."""
        self._put.put(None)

    def __iter__(self) -> Iterator[M]:
        while (messages := self._put.get()) is not None:
            yield from messages
