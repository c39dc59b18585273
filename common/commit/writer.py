"""Writes a participant's parts beside the training, on a thread: a step waits only for the copy that is handed over.

One participant ends commits as well, on another thread: its own parts must not wait for those of others, for whoever is
waited for may be dead, which only the training notices.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from common.commit.folder import CommitFolder
from common.commit.manifest import Manifest, PartEntry
from common.commit.parts import Part
from common.errors import CommitFailed

__all__ = ["Writer"]

POLL_S = 0.01
AT_END_S = 2.0  # for others' parts when this process is ending without having waited for them

Describe = Callable[[dict[str, PartEntry]], Manifest]


class Writer:
    """One part at a time: the next one waits for the one before. Close it in any case.

    Args:
        name: of the participant's parts, as in `rank-0`.
        on_error: is told at once, on the thread, of what `check` raises later.
    """

    def __init__(
        self, folder: CommitFolder, name: str, *, on_error: Callable[[CommitFailed], None] = lambda _: None
    ) -> None:
        self._folder, self._name, self._on_error = folder, name, on_error
        self._parts, self._ends = (ThreadPoolExecutor(1, f"gradsync-{what}") for what in ("part", "commit"))
        self._part: list[Future[None]] = []  # that is being written
        self._ending: list[Future[None]] = []  # commits
        self._left = threading.Event()
        self._failed: Future[None] | None = None  # a commit, as `check` has seen once

    def write(self, step: int, part: Part) -> None:
        """Returns at once, unless the part before is still being written; the arrays must not change any more.

        Raises:
            CommitFailed: the one before could not be written.
        """
        take(self._part)
        work = partial(self._folder.write_part, step, self._name, part)
        self._part.append(self._parts.submit(self._in_words, work))

    def complete(self, step: int, names: Sequence[str], describe: Describe, *, keep: int, timeout: float) -> None:
        """After `write`, for one participant: end the commit once the parts of all `names` are there.

        Args:
            describe: makes its manifest from the parts' entries.
            keep: how many commits stay.
            timeout: seconds that the other parts may take after this participant's.
        """
        work = partial(self._complete, step, names, describe, keep, timeout)
        self._ending.append(self._ends.submit(self._in_words, work))

    def check(self) -> None:
        """Does not block. That a commit could not be ended only the call after says: another's part may be missing, and
        if that one is dead, the step in between has noticed.

        Raises:
            CommitFailed: something could not be written.
        """
        while self._part and self._part[0].done():
            take(self._part, 1)
        while self._ending and self._ending[0].done():
            if self._ending[0].exception() and self._ending[0] is not self._failed:
                self._failed = self._ending[0]
                return
            take(self._ending, 1)

    def finish(self) -> None:
        """Block until all is written.

        Raises:
            CommitFailed: something could not be.
        """
        take(self._part)
        take(self._ending)

    def close(self) -> None:
        """End the threads: what is there is written, and commits are ended whose parts all are; others are not waited
        for any longer."""
        self._parts.shutdown()
        self._left.set()
        self._ends.shutdown()

    def _in_words(self, work: Callable[[], None]) -> None:
        try:
            work()
        except CommitFailed as exc:
            self._on_error(exc)
            raise

    def _complete(self, step: int, names: Sequence[str], describe: Describe, keep: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        entries: dict[str, PartEntry] = {}
        while missing := [name for name in names if name not in entries]:
            for name in missing:
                if entry := self._folder.entry(step, name):
                    entries[name] = entry
            if len(entries) == len(names):
                break
            if not threading.main_thread().is_alive():
                deadline = min(deadline, time.monotonic() + AT_END_S)
            if time.monotonic() > deadline:
                raise CommitFailed(
                    f"the commit of step {step:,} in {self._folder} has no part of {', '.join(missing)} after "
                    f"{timeout:g} s; all hosts must share this folder"
                )
            if self._left.wait(POLL_S):
                return
        self._folder.write_manifest(describe({name: entries[name] for name in names}))
        self._folder.prune(keep)


def take(pending: list[Future[None]], count: int = 0) -> None:
    """Wait for the first so many, or all, and raise what came of them."""
    for _ in range(count or len(pending)):
        pending.pop(0).result()
