"""A process that outlives another one's death waits for its launcher's word, which makes it a member of the next epoch.

    rank       closes its group, notes that it waits  ->  reads the word, joins the group of the new epoch, notes so
    launcher   starts the dead again, until they join ->  gives the word: epoch, meeting place, secret

Where ranks meet at servers, these have to be there first: the word that makes servers go on has no meeting place yet.

Why it may: GRADSYNC_WORD says that the launcher gives such a word, and where. What a process leaves behind for the one
that takes its place lies in memory that the launcher holds (GRADSYNC_KEPT; common/commit/kept_parts.py).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from common.system.fault_points import begin_life
from common.system.private_files import open_private
from common.system.process import JOB_SECRET_VARIABLE, RESTARTS_VARIABLE, note, restarts

__all__ = [
    "GOES_ON",
    "WAITS",
    "WORD_VARIABLE",
    "Word",
    "begin_epoch",
    "has_begun_without_this",
    "is_mended",
    "note_going_on",
    "note_waiting",
    "word_in",
]

WORD_VARIABLE = "GRADSYNC_WORD"  # the file of the launcher's word
WAITS, GOES_ON = "waits", "goes on"  # how notes to the launcher begin
POLL_S = 0.005


@dataclass(frozen=True)
class Word:
    """Of the group that comes next."""

    epoch: int
    rendezvous: str  # or the servers' addresses; "": it is not known yet
    secret: str  # of the job

    def give(self, path: Path) -> None:
        draft = path.with_name(path.name + ".new")
        with open_private(draft) as out:
            out.write(json.dumps(asdict(self)).encode())
        draft.replace(path)


def note_waiting(why: str) -> None:
    """Let the launcher know that this process, whose group is broken, can go on in the next epoch."""
    note(f"{WAITS} {restarts() + 1} {' '.join(why.split())}")


def begin_epoch(
    who: str,
    seconds: float,
    *,
    is_met: bool = False,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Word | None:
    """Block until the launcher has given its word; from then on this process is of that epoch and knows its secret.

    Args:
        who: "rank 1" or "server 0".
        is_met: others meet at this process, so that a word without a place will do.

    Returns:
        None: it gave none in so many seconds.
    """
    path, deadline = Path(os.environ[WORD_VARIABLE]), clock() + seconds
    while (word := word_in(path)) is None or word.epoch <= restarts() or not (is_met or word.rendezvous):
        if clock() > deadline:
            return None
        pause(POLL_S)
    os.environ[RESTARTS_VARIABLE], os.environ[JOB_SECRET_VARIABLE] = str(word.epoch), word.secret
    begin_life(who, word.epoch)
    return word


def has_begun_without_this() -> bool:
    """Whether the launcher has given the word of an epoch after this process's."""
    path = os.environ.get(WORD_VARIABLE)
    word = word_in(Path(path)) if path else None
    return word is not None and word.epoch > restarts()


def is_mended() -> bool:
    """Whether this epoch is one in which others have gone on."""
    path = os.environ.get(WORD_VARIABLE)
    word = word_in(Path(path)) if path else None
    return word is not None and word.epoch == restarts()


def word_in(path: Path) -> Word | None:
    try:
        return Word(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None


def note_going_on(step: int, made: int) -> None:
    """Let the launcher know that this process goes on after that step, of `made` steps that it had made."""
    note(f"{GOES_ON} {restarts()} {step} {made}")
