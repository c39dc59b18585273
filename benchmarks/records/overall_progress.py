"""How far a job of several commands has come, and how long it will take still."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from benchmarks.records.progress import QUIET_S

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

    def __init__(self, console: Console, parts: Sequence[tuple[str, float, float]]) -> None:
        """`parts`: the title of each, the minutes that all of it takes, about, and the share that an earlier job has
        done."""
        self.words = ""  # what is shown
        self._terminal = console.is_terminal
        columns = (BarColumn(bar_width=20), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not self._terminal)
        self._titles, self._minutes = [title for title, _, _ in parts], [minutes for _, minutes, _ in parts]
        self._shares = [share for _, _, share in parts]
        self._before = self._done()
        self._task = self._bar.add_task("", total=sum(self._minutes))

    def __enter__(self) -> OverallProgress:
        self._begun = time.monotonic()
        self._told = self._begun - QUIET_S
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, part: int, share: float, what: str) -> None:
        """So much of a part is done, and `what` is what it does now."""
        self._shares[part] = share
        done, now = self._done(), time.monotonic()
        left = minutes_left([*self._minutes, -self._before], done - self._before, (now - self._begun) / 60)
        ended = f"{self._shares.count(1.0)} of {len(self._shares)} parts done, about {max(1, round(left))} min left"
        self.words = f"{ended}; now {self._titles[part]}{f': {what}' if what else ''}"
        self._bar.update(self._task, completed=done, description=self.words)
        if not self._terminal and now - self._told >= QUIET_S:
            print(self.words, file=sys.stderr, flush=True)
            self._told = now

    def _done(self) -> float:
        """Of the minutes."""
        return sum(share * minutes for share, minutes in zip(self._shares, self._minutes, strict=True))
