"""What is left of killed processes: others that they had started, and Paddle's files in shared memory.

The workers of a DataLoader outlive a process that is killed: they wait for their next task without a limit, for Paddle
hands the seconds after which it would look for its parent to `Queue.get` as `block`. They hold batches in /dev/shm that
nobody will fetch. Standard library only: the guard of a launcher (common/launch/guard.py) starts within 30 ms.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FOLDER", "Session", "clear_away", "is_alive", "is_anothers", "members_of", "session_of"]

FOLDER = "gradsync-"  # what a job's temporary folder is called: and its launcher's or keeper's process id
SHARED_MEMORY = Path("/dev/shm")
OF_PADDLE = re.compile(r"paddle_(\d+)_")  # its maker's process id
GONE_S = 5.0  # for the kernel to end what was killed
POLL_S = 0.005


@dataclass(frozen=True)
class Session:
    """All that a process started, which was made the leader of a session of its own (setsid).

    Args:
        started: when, in ticks since the machine did; None: it had ended before anybody looked. As long as a member
            lives, the kernel gives the leader's number to no other process; afterwards this tells them apart.
    """

    leader: int
    started: int | None


def session_of(leader: int) -> Session:
    stat = stat_of(leader)
    return Session(leader, stat.started if stat else None)


def members_of(sessions: Collection[Session]) -> set[int]:
    """Process ids of all that live in these sessions."""
    ours = {session.leader for session in sessions if not is_anothers(session)}
    return {pid for pid, stat in processes() if stat.session in ours and stat.state not in "ZX"} if ours else set()


def clear_away(sessions: Collection[Session], *, also: Collection[int] = ()) -> None:
    """Kill what lives in these sessions, and remove what Paddle has put into shared memory for anyone of them.

    Args:
        also: process ids of members that have ended by now.
    """
    owners = {session.leader for session in sessions} | {*also}
    deadline = time.monotonic() + GONE_S
    while (alive := members_of(sessions)) and time.monotonic() < deadline:  # again, for they may fork meanwhile
        owners |= alive
        for pid in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    for file in SHARED_MEMORY.glob("paddle_*"):
        if (made := OF_PADDLE.match(file.name)) and int(made[1]) in owners and not is_alive(int(made[1])):
            with suppress(OSError):
                file.unlink()


def is_alive(pid: int) -> bool:
    """Whether there is such a process, which has not ended, be it that nobody has asked yet how."""
    stat = stat_of(pid)
    return stat is not None and stat.state not in "ZX"


def is_anothers(session: Session) -> bool:
    """Its members have all ended, and the leader's number was given to another process."""
    stat = stat_of(session.leader)
    return stat is not None and session.started not in (None, stat.started)


@dataclass(frozen=True)
class Stat:
    """Of /proc/PID/stat, what is needed; proc(5)."""

    state: str
    session: int
    started: int


def stat_of(pid: int) -> Stat | None:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return Stat(words[0], int(words[3]), int(words[19]))
    except (OSError, IndexError):  # it has ended
        return None


def processes() -> Iterator[tuple[int, Stat]]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := stat_of(int(name))):
            yield int(name), stat
