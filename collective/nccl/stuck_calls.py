"""Ends a process that is stuck in a call nobody can interrupt, with the error that says why."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from common.errors import GradSyncError
from common.system.process import last_words

__all__ = ["Watchdog", "end_process"]

SLICE_S = 0.05  # how often it looks


class Watchdog:
    """A thread beside one that calls into NCCL. A context manager made by `over`, around each such call.

    While a call lasts the watchdog looks after the group in the caller's place; between calls it touches nothing.

    Args:
        look: called with (what is under way, since how many seconds); raises a GradSyncError to end it.
        end: given that error; the process is stuck.
    """

    def __init__(self, look: Callable[[str, float], None], end: Callable[[GradSyncError], None]) -> None:
        self._look, self._end = look, end
        self._call: tuple[str, float] | None = None  # what is under way, since when (monotonic seconds)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gradsync-watchdog", daemon=True)
        self._thread.start()

    def over(self, doing: str) -> Watchdog:
        """Watch what is done within."""
        self._doing = doing
        return self

    def __enter__(self) -> None:
        self._call = (self._doing, time.monotonic())

    def __exit__(self, *_: object) -> None:
        with self._lock:  # not in the midst of a look
            self._call = None

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(SLICE_S):
            with self._lock:
                if self._call is None:
                    continue
                doing, since = self._call
                try:
                    self._look(doing, time.monotonic() - since)
                except GradSyncError as exc:
                    self._call = None
                    self._end(exc)


def end_process(error: GradSyncError) -> None:
    """Say why, and end with the error's exit code, without any cleaning up: other threads may hold any lock."""
    with last_words():
        print(f"{type(error).__name__}: {error}; NCCL holds this process, so it ends", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
