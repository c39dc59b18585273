"""A small process beside a launcher that clears away what it leaves if it is killed, or its terminal is closed.

The kernel ends ranks and servers with their launcher (`die_with_parent`), but not what they have started themselves,
and nobody removes files. The guard lives in a session of its own, so that no signal of the terminal reaches it.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.commit.kept_parts import path_of
from common.system.leftovers import FOLDER, Session, clear_away, session_of

__all__ = ["ROOT", "Guard", "main"]

ROOT = Path(__file__).parents[2]  # of our packages
START = "import sys; sys.path.append(sys.argv[1]); from common.launch.guard import main; main()"
MOST = 1 << 16


class Guard:
    """The launcher's side.

    Attributes:
        folder: for temporary files, which its user removes.
        parent: process id of those that it starts.
    """

    def __init__(self) -> None:
        self.parent = os.getpid()
        folders = Path(tempfile.gettempdir(), f"{FOLDER}{self.parent}-")
        self.folder = Path(tempfile.mkdtemp(prefix=folders.name))
        command = [sys.executable, "-I", "-S", "-c", START, str(ROOT), str(os.getpid()), str(folders)]
        nowhere = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True, cwd="/"
        )

    def start(
        self,
        name: str,  # noqa: ARG002 - that is for whoever adopts (adoption.py), as is `about`
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        streams: Mapping[str, Any],
        about: Any,  # noqa: ARG002
    ) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own."""
        return subprocess.Popen(command, start_new_session=True, env=environment, **streams)

    def watch(self, leader: int) -> Session:
        """From now on, the session of that child too."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody has killed it
            os.write(self._process.stdin.fileno(), f"{leader}\n".encode())
        return session_of(leader)

    def hold(self, name: str, descriptor: int) -> str:  # noqa: ARG002
        """The path by which processes of this user open what this launcher holds."""
        return path_of(descriptor)

    def dismiss(self) -> None:
        """The launcher has cleared away by itself."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()


def main() -> None:
    """The guard: notes what its stdin names until the launcher ends, then ends and removes what that has left."""
    launcher, folders = int(sys.argv[2]), Path(sys.argv[3])
    told, sessions = b"", []
    while told_more := next_words(launcher):
        told += told_more
        *leaders, told = told.split(b"\n")
        sessions += [session_of(int(leader)) for leader in leaders]
    clear_away(sessions)
    for folder in folders.parent.glob(f"{folders.name}*"):
        shutil.rmtree(folder, ignore_errors=True)


def next_words(launcher: int) -> bytes:
    """What it says next; nothing at its end. A child that it has forked may hold the pipe open, hence the other look.

    Blocks without a limit.
    """
    ready = select.poll()
    ready.register(0, select.POLLIN)
    try:
        ended = os.pidfd_open(launcher)
    except OSError:  # it has ended, or the kernel knows no such descriptors
        return os.read(0, MOST)
    try:
        ready.register(ended, select.POLLIN)
        return os.read(0, MOST) if any(descriptor == 0 for descriptor, _ in ready.poll()) else b""
    finally:
        os.close(ended)
