"""How far a job of several commands has come, and how long it will take still."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from benchmarks.progress import QUIET_S

__all__ = ["OverallProgress", "minutes_left"]


def minutes_left(expected: Sequence[float], done: float, elapsed_min: float) -> float:
    """The expected minutes that are left, at the pace so far; the first expected minute counts as kept to.

    Args:
        expected: of each part, in minutes.
        done: of their sum.
        elapsed_min: since the start.
    """
    return (sum(expected) - done) * (elapsed_min + 1) / (done + 1)


class OverallProgress:
    """A bar on a terminal, elsewhere a line now and then; a context manager."""

    def __init__(self, console: Console, minutes: Sequence[float]) -> None:
        """`minutes` that each part will take, about."""
        self.words = ""  # what is shown
        self._terminal = console.is_terminal
        columns = (BarColumn(bar_width=20), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not self._terminal)
        self._minutes, self._part, self._title = list(minutes), -1, ""
        self._task = self._bar.add_task("", total=sum(minutes))

    def __enter__(self) -> OverallProgress:
        self._begun = time.monotonic()
        self._told = self._begun - QUIET_S
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, title: str) -> None:
        """The next part begins."""
        self._part, self._title = self._part + 1, title
        self._show(0.0, "")

    def read(self, path: Path) -> None:
        """What the part has told about itself: benchmarks/progress.py."""
        try:
            started, total, what = path.read_text().split(" ", 2)
            share = int(started) / max(1, int(total))
        except (OSError, ValueError):  # not yet, or half written
            return
        self._show(min(share, 1.0), what)

    def _show(self, share: float, what: str) -> None:
        done = sum(self._minutes[: self._part]) + share * self._minutes[self._part]
        now = time.monotonic()
        left = minutes_left(self._minutes, done, (now - self._begun) / 60)
        place = f"part {self._part + 1} of {len(self._minutes)}, about {max(1, round(left))} min left"
        self.words = f"{place}; now {self._title}{f': {what}' if what else ''}"
        self._bar.update(self._task, completed=done, description=self.words)
        if not self._terminal and now - self._told >= QUIET_S:
            print(self.words, file=sys.stderr, flush=True)
            self._told = now
