"""An actor of Ray's that runs one process of a job on its node, as a launcher would, and tells the driver of it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from common.errors import UsageError
from common.launch.child import Child
from common.launch.hosts import START
from common.launch.job import POLL_S, Job
from common.launch.restarts import Life
from common.system.out_of_memory import killed_for_memory

__all__ = ["News", "Order", "Seat"]

OUT, ERR, LOG = "out", "err", "log"


@dataclass(frozen=True)
class Order:
    """What a driver wants to be run.

    Args:
        start, scratch: paths of the driver's host, which are others on this one: of start.py, and of a folder into
            which the process writes files for the launcher.
        folder: in which it runs.
        host: this node's address, for people.
        apart: its two outputs are told apart, and its last words kept, as of a process on the launcher's terminal.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    start: str
    scratch: str
    folder: str
    host: str
    apart: bool


@dataclass(frozen=True)
class News:
    """Of a process, since the last ones.

    Args:
        out, err: what it has written; all of it is in `out`, unless it was ordered apart.
        notes: what it has told the launcher (common/system/process.py:note).
        words: its last ones.
        files: those for the launcher, by name.
        code: None: it runs.
        killed: how many processes that node's kernel has killed meanwhile for lack of memory.
    """

    out: bytes = b""
    err: bytes = b""
    notes: bytes = b""
    words: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    code: int | None = None
    frozen: bool = False
    peak_bytes: int = 0
    killed: int = 0


class Seat:
    """The actor. Its methods run one after the other, in its main thread: the kernel ends the process with it.

    Args:
        variables: what its process has in its environment beside what is there on the node.
        life: which of the job's this is.
    """

    def __init__(self, variables: Mapping[str, str], life: int) -> None:
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's; a launcher leaves that to the process
        os.environ.update(variables)
        self._resources = ExitStack()
        self._job = self._resources.enter_context(Job(all_ranks_here=False, life=Life(life)))
        self._killed = killed_for_memory()
        self._files: list[Path] = []
        self._read: dict[Path, BinaryIO] = {}

    def free_port(self, host: str) -> int:
        """One that nobody uses now at that address of this node."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])

    def start(self, order: Order) -> None:
        """
        Raises:
            UsageError: the folder is not there.
        """
        try:
            os.chdir(order.folder)
        except OSError as exc:
            raise UsageError(
                f"node {order.host} has no folder {order.folder} ({exc.strerror}), in which the command was given: "
                "give it where all nodes have one"
            ) from exc
        scratch = self._job.scratch
        own = {order.start: str(START)}
        command = [own.get(word, word) for word in order.command]
        command = [word.replace(order.scratch, str(scratch), 1) for word in command]
        self._files = [Path(word) for word in command if word.startswith(str(scratch))]
        if order.apart:
            out, err = (self._resources.enter_context((scratch / name).open("ab")) for name in (OUT, ERR))
            self._job.terminal = out, err
        self._job.start(order.name, command, log=LOG, environment=order.environment, on_terminal=order.apart)

    def news(self, seconds: float) -> News:
        """As soon as there are some; after so many seconds, whatever there is."""
        deadline = time.monotonic() + seconds
        while True:
            code = self._child.code  # before its output is read: then that is whole
            news = self._look(code)
            if code is not None or news.out or news.err or news.notes or news.files or time.monotonic() > deadline:
                return news
            time.sleep(POLL_S)

    def end(self) -> None:
        """End the process and all that it has started."""
        self._resources.close()

    @property
    def _child(self) -> Child:
        return self._job.children[0]

    def _look(self, code: int | None) -> News:
        child, scratch = self._child, self._job.scratch
        child.look()
        files = {path.name: path.read_bytes() for path in self._files if path.exists()}
        self._files = [path for path in self._files if path.name not in files]
        return News(
            out=self._new(scratch / OUT) + self._new(scratch / LOG),
            err=self._new(scratch / ERR),
            notes=self._new(child.joined),
            words=child.words.read_bytes() if code and child.words.exists() else b"",
            files=files,
            code=code,
            frozen=code is None and child.is_frozen(),
            peak_bytes=child.peak_bytes,
            killed=killed_for_memory() - self._killed,
        )

    def _new(self, path: Path) -> bytes:
        """What was written to a file since it was asked for."""
        if path not in self._read:
            if not path.exists():
                return b""
            self._read[path] = self._resources.enter_context(path.open("rb"))
        return self._read[path].read()
