"""Callers who have not shown yet that they belong here: few at a time, and none for long.

Each holds a thread and some memory of a server's. Whoever has waited longest makes room for the next one, so that many
callers who say nothing keep nobody out who says at once who he is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

__all__ = ["HELLO_S", "MOST_CALLERS", "MOST_HELLO", "Callers"]

HELLO_S = 5.0  # in which a caller says who it is
MOST_CALLERS = 64
MOST_HELLO = 1 << 16  # bytes of a caller's first message


class Callers:
    """Thread-safe.

    Args:
        most: callers at a time.
        seconds: that each may take.
    """

    def __init__(self, *, most: int = MOST_CALLERS, seconds: float = HELLO_S) -> None:
        self._most, self._seconds = most, seconds
        self._lock = threading.Condition()  # notified when nobody waits any longer
        self._callers: dict[int, tuple[float, Callable[[], object]]] = {}  # oldest first: deadline, and how it ends
        self._count = 0
        self._watched = False

    @contextmanager
    def waits(self, turn_away: Callable[[], object]) -> Iterator[None]:
        """Within, a caller is heard of whom nothing is known; `turn_away` is called, from any thread, if it takes too
        long or must make room. It must not block."""
        with self._lock:
            number, self._count = self._count, self._count + 1
            oldest = next(iter(self._callers)) if len(self._callers) >= self._most else None
            crowded_out = None if oldest is None else self._callers.pop(oldest)
            self._callers[number] = (time.monotonic() + self._seconds, turn_away)
            watch, self._watched = not self._watched, True
        if crowded_out:
            crowded_out[1]()
        if watch:
            threading.Thread(target=self._watch, name="gradsync-door", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._callers.pop(number, None)
                if not self._callers:
                    self._lock.notify_all()

    def _watch(self) -> None:
        """Until nobody waits any longer."""
        while late := self._late():
            for turn_away in late:
                turn_away()

    def _late(self) -> list[Callable[[], object]]:
        """How the next ones end that take too long; none when nobody waits."""
        with self._lock:
            late: list[Callable[[], object]] = []
            while self._callers and not late:
                now = time.monotonic()
                while self._callers and next(iter(self._callers.values()))[0] <= now:
                    late.append(self._callers.pop(next(iter(self._callers)))[1])
                if not late:
                    self._lock.wait(next(iter(self._callers.values()))[0] - now)
            self._watched = bool(late)
            return late

    def first_of(self, received: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """A call's first message, undecoded. Ends the call if none comes in time, or one that is too long."""
        with self.waits(context.cancel):
            data = next(received, None)
        if data is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call without a message")
        if len(data) > MOST_HELLO:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{len(data):,} bytes, more than {MOST_HELLO:,}")
        return data
