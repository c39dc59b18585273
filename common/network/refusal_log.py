"""Callers who were turned away are told about on stderr: the first at once, the others in a line a minute at most."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress

__all__ = ["Refusals"]

EVERY_S = 60.0


class Refusals:
    """Of one port; thread-safe.

    Args:
        where: strangers have called.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._lock = threading.Lock()
        self._told_at = -EVERY_S
        self._untold, self._last = 0, ""

    def note(self, caller: str, why: str) -> None:
        """One more was turned away.

        Args:
            caller: its address, "" if it has none.
            why: in words.
        """
        with self._lock:
            self._untold += 1
            self._last = f"{f'from {caller}' if caller else 'of this host'}: {why}"
            if time.monotonic() >= self._told_at + EVERY_S:
                self._tell()

    def close(self) -> None:
        """Tell of those who were not told of yet."""
        with self._lock:
            if self._untold:
                self._tell()

    def _tell(self) -> None:
        whom = "a caller " if self._untold == 1 else f"{self._untold:,} callers, the last "
        self._told_at, self._untold = time.monotonic(), 0
        with suppress(OSError, ValueError):  # nobody reads it any longer
            print(f"gradsync: {self._where} turned away {whom}{self._last}", file=sys.stderr, flush=True)
