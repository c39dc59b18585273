"""The project's commands as real processes, and what is waited for."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support import warm
from tests.support.groups import ROOT, environment

__all__ = ["JOB", "Started", "can_listen", "digest_in", "end_all", "is_running", "start_server", "until", "watched"]

DEADLINE_S = 40.0  # of everything that ought to be done in a few seconds
JOB = ["--model", "mlp:8", "--dataset", "synthetic", "--batch-size", "4"]


class Started:
    """A command under way; what it writes goes to files, so that it never waits for us."""

    def __init__(self, folder: Path, *command: object, through: Sequence[str] = ()) -> None:
        self.name = " ".join(map(str, command[:3]))
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            arguments = [*through, sys.executable, "-m", *map(str, command)]
            self.process = warm.Popen(
                arguments,
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # as a terminal has it: the launcher leads a group
            )

    @property
    def code(self) -> int:
        """How it ended; waits for that."""
        return self.process.wait(DEADLINE_S)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def ended_well(self, *, telling: str = "nothing") -> None:
        """Lines on stderr may only be of what is told so."""
        assert self.code == 0, f"{self.name}: {self.err}"
        assert [line for line in self.err.splitlines() if telling not in line] == []

    def refused(self, *texts: str, code: int = 2) -> None:
        """It ended with this exit code and one line on stderr that holds all of `texts`."""
        assert self.code == code, f"{self.name}: {self.err}"
        assert len(self.err.splitlines()) == 1, self.err
        line = self.err
        for text in texts:
            assert text in line


def is_running(process: psutil.Process) -> bool:
    """Neither gone nor a zombie."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end_all(started: Sequence[Started]) -> None:
    for one in started:
        one.process.kill()
    for one in started:
        one.process.wait()


def until(condition: Callable[[], Any], what: str, why_not: Callable[[], str] = str) -> Any:
    """Poll until `condition` gives something, and return it."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still waiting for {what}: {why_not()}"
        time.sleep(0.01)
    return found


def can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
        return True


def start_server(start: Callable[..., Started], nranks: int, *flags: object) -> tuple[Started, str]:
    server = start("ps.server", "--port", 0, "--nranks", nranks, *flags)
    line = until(lambda: "listens on" in server.out and server.out, "the server")
    return server, str(line).split(" listens on ")[1].split()[0]


def digest_in(file: Path) -> str:
    """Of the parameters, in the record of a training."""
    return str(json.loads(file.read_text())["parameters_sha256"])


def watched(job: Started, seconds: float = DEADLINE_S) -> int:
    """How many processes a launcher has had, its guard included, once it has ended."""
    seen, deadline = set[int](), time.monotonic() + seconds
    while job.process.poll() is None and time.monotonic() < deadline:
        seen |= children(job.process.pid)
        time.sleep(0.002)  # between two looks
    return len(seen)


def children(pid: int) -> set[int]:
    try:
        return {int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except OSError:
        return set()
