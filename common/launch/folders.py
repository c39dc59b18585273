"""Temporary folders of jobs: what is noted there, so that it can be cleared away when a launcher was killed, guards and
all."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from common.system.leftovers import FOLDER, Session, clear_away, is_alive, is_anothers

__all__ = ["note_session", "remove_folders_of_the_dead"]

SESSIONS = "sessions"  # the file of what was started: leader, and when


def note_session(folder: Path, session: Session) -> None:
    with (folder / SESSIONS).open("a") as out:
        out.write(f"{session.leader} {session.started or 0}\n")


def remove_folders_of_the_dead() -> None:
    """Temporary folders of launchers that were killed before they could remove them, guards and all, and what else they
    have left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}[0-9]*-*"):
        number = folder.name.removeprefix(FOLDER).partition("-")[0]
        if number.isdigit() and not is_alive(int(number)):
            clear_away(sessions_in(folder))
            shutil.rmtree(folder, ignore_errors=True)


def sessions_in(folder: Path) -> list[Session]:
    """That a launcher has noted there, and whose numbers are no other processes' by now."""
    with suppress(OSError, ValueError):
        lines = (folder / SESSIONS).read_text().splitlines()
        noted = [Session(int(leader), int(started)) for leader, started in map(str.split, lines)]
        return [each for each in noted if each.started and not is_anothers(each)]
    return []
