"""How far a long run has come: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["PROGRESS_VARIABLE", "QUIET_S", "progress", "told_by"]

PROGRESS_VARIABLE = "GRADSYNC_PROGRESS"  # a file in which whoever started this run reads how far it is
QUIET_S = 30.0  # between two lines where there is no terminal


@contextmanager
def progress(
    console: Console, total: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[..., None]]:
    """A function to be called with what is about to run, `total` times, or until the costs that it is given add up to
    that."""
    begun = told = clock()
    started = 0
    told_to = os.environ.get(PROGRESS_VARIABLE)
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(
        *columns, TextColumn("{task.description}"), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)

        def on_run(what: str, cost: int = 1) -> None:
            nonlocal started, told
            bar.update(task, completed=started, description=what)
            if told_to:
                Path(told_to).write_text(f"{started} {total} {what}")
            now = clock()
            if not console.is_terminal and now - told >= QUIET_S:
                left = (now - begun) * (total - started) / max(1, started)
                done = f"{started} of {total} done after {now - begun:.0f} s, about {left:.0f} s left"
                print(f"{done}; now {what}", file=sys.stderr, flush=True)
                told = now
            started += cost

        yield on_run


def told_by(file: Path) -> str:
    """What a run does now, as it has told in the file of PROGRESS_VARIABLE."""
    try:
        return file.read_text().split(" ", 2)[2]
    except (OSError, IndexError):  # not yet, or half written
        return ""
