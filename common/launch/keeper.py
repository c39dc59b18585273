"""A small process that is the parent of a job's processes, where --adopt-for lets them outlive their launcher.

    launcher   asks it to start processes, and to hold memory for them (common/commit/kept_parts.py)
    keeper     knows how each has ended; when the launcher dies, lets the next one take its place; when none comes
               within so many seconds, ends all and removes what they have left

The launcher's side is in adoption.py. They talk over a Unix socket without a file, a JSON text a line, and the keeper
answers each of the launcher's; it turns away other users, and a second launcher while the first one lives. The kernel
ends the processes with their parent, so with the keeper. Standard library only, as the guard (guard.py), in whose place
it is.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.system.leftovers import FOLDER, Session, clear_away, session_of

__all__ = ["Keeper", "main"]

MOST = 1 << 16
ANSWER_S = 5.0  # for a launcher to take an answer
CREDENTIALS = struct.Struct("3i")  # process, user, group: unix(7)


def main() -> None:
    """The keeper of the launcher that has started it: given its descriptors of the name's socket and of that launcher's
    connection, its process id, how long to wait for the next one, and the folder for temporary ones."""
    listener, first, launcher, seconds, folder = sys.argv[2:]
    keeper = Keeper(socket.socket(fileno=int(listener)), float(seconds), Path(folder))
    keeper.watch(socket.socket(fileno=int(first)), int(launcher))
    keeper.serve()


class Keeper:
    """
    Args:
        listener: where the next launcher comes.
        seconds: how long to wait for it.
        temporary: the folder in which the job's own is made.
    """

    def __init__(self, listener: socket.socket, seconds: float, temporary: Path) -> None:
        self._listener, self._seconds = listener, seconds
        listener.listen()
        self._folder = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-", dir=temporary)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._sessions: list[Session] = []
        self._members: dict[str, dict[str, Any]] = {}  # by their names, the newest: process id, and what is said of it
        self._held: dict[str, int] = {}  # descriptors, by names
        self._notes: Any = None  # of the launcher for the next one; None: there is nothing to be taken over
        self._launcher = 0
        self._died_at: float | None = None  # when the last launcher did
        self._connection: socket.socket | None = None
        self._ended = -1  # a descriptor that tells the launcher's end
        self._told, self._given = b"", list[int]()

    def watch(self, connection: socket.socket, launcher: int) -> None:
        """From now on obey whoever is there, once it is told what there is.

        Raises:
            OSError: it has ended.
        """
        self._ended = os.pidfd_open(launcher)
        self._connection, self._told = connection, b""
        connection.settimeout(ANSWER_S)
        self._answer(
            keeper=os.getpid(),
            folder=self._folder,
            members={name: {**one, "code": self._processes[one["pid"]].poll()} for name, one in self._members.items()},
            held=self._held,
            notes=self._notes,
            launcher=self._launcher,
            died_at=self._died_at,
        )
        if not self._launcher:
            self._launcher = launcher

    def serve(self) -> None:
        """Until there is no launcher any more, and none will come."""
        while (left := self._left()) > 0:
            looked_at = select.poll()
            looked_at.register(self._listener, select.POLLIN)
            if self._connection:
                looked_at.register(self._connection, select.POLLIN)
                looked_at.register(self._ended, select.POLLIN)
            ready = [descriptor for descriptor, _ in looked_at.poll(None if left == float("inf") else 1000 * left)]
            if self._connection and self._ended in ready:
                self._lose()
            elif self._connection and self._connection.fileno() in ready:
                self._hear(self._connection)
            elif ready:
                self._let_in(self._listener.accept()[0])
        if self._died_at is not None and self._notes is not None:
            say(f"nobody came within {self._seconds:g} s (--adopt-for): ends {', '.join(self._members)}")
        clear_away(self._sessions)
        for folder in Path(self._folder).parent.glob(f"{FOLDER}{os.getpid()}-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _left(self) -> float:
        """Seconds to wait for the next launcher."""
        if self._died_at is None:
            return float("inf")
        return self._died_at + self._seconds - time.monotonic() if self._notes is not None else 0.0

    def _lose(self) -> None:
        """The launcher has ended, or lets go of the job."""
        assert self._connection
        self._connection.close()
        os.close(self._ended)
        self._connection = None
        if self._died_at is None:
            self._died_at = time.monotonic()
            if self._notes is not None:
                say(f"launcher {self._launcher} has died; waits {self._seconds:g} s for the next one (--adopt-for)")

    def _let_in(self, connection: socket.socket) -> None:
        process, user, _ = CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        )
        connection.settimeout(ANSWER_S)
        if user == os.geteuid() and not self._connection:
            with suppress(OSError):
                self.watch(connection, process)
                return
        elif user == os.geteuid():
            tell(connection, {"refused": self._launcher})
        connection.close()

    def _hear(self, connection: socket.socket) -> None:
        """Do what the launcher asks for, once its words are there."""
        try:
            told, given, *_ = socket.recv_fds(connection, MOST, 1)
        except OSError:
            told, given = b"", []
        for descriptor in given:
            os.set_inheritable(descriptor, False)
        self._told, self._given = self._told + told, self._given + given
        if not told:
            self._lose()
        elif self._told.endswith(b"\n"):
            asked, self._told = json.loads(self._told), b""
            given, self._given = self._given, []
            self._answer(**getattr(self, f"_do_{asked.pop('do')}")(given, **asked))

    def _do_start(self, given: list[int], *, name: str, about: Any, **how: Any) -> Any:
        """Start a process, which writes to what was given."""
        try:
            process = subprocess.Popen(
                how["command"],
                stdin=subprocess.DEVNULL,
                stdout=given[0],
                stderr=given[0],
                start_new_session=True,
                env=how["environment"],
            )
        except OSError as exc:
            return {"errno": exc.errno, "strerror": exc.strerror}
        finally:
            os.close(given[0])
        self._processes[process.pid] = process
        self._sessions.append(session := session_of(process.pid))
        self._members[name] = {"pid": process.pid, "started": session.started, "about": about}
        return self._members[name]

    def _do_code(self, _: list[int], pid: int) -> Any:
        """How a process has ended."""
        return {"code": self._processes[pid].wait()}

    def _do_hold(self, given: list[int], name: str) -> Any:
        self._held[name] = given[0]
        return {"descriptor": given[0]}

    def _do_note(self, _: list[int], notes: Any) -> Any:
        self._notes = notes
        return {}

    def _do_adopt(self, _: list[int], launcher: int) -> Any:
        """The next launcher takes the job over."""
        self._launcher, self._died_at = launcher, None
        say(f"launcher {launcher} has taken the job over")
        return {}

    def _answer(self, **words: Any) -> None:
        assert self._connection
        tell(self._connection, words)


def tell(connection: socket.socket, words: Any) -> None:
    with suppress(OSError):  # it has died, which is seen elsewhere
        connection.sendall(json.dumps(words).encode() + b"\n")


def say(what: str) -> None:
    """In its log."""
    print(f"gradsync: {what}", file=sys.stderr, flush=True)
