"""Python programs run as processes without each of them importing Paddle anew: `run` and `Popen` stand in for
subprocess's where a test runs whole trainings. How that is done is said in forked_program.py."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from tests.support.groups import ROOT

__all__ = ["COLD_VARIABLE", "Popen", "run"]

PADDLES_LAUNCHER = (
    "paddle.distributed.launch"  # never from a fork: at their end ranks of Paddle's own group may abort there
)
COLD_VARIABLE = "GRADSYNC_TEST_COLD"  # set: every program gets an interpreter of its own, as for measuring coverage
START_S = 60.0
MOST = 1 << 20  # bytes of a message
ROOM = 4000  # for the command lines of what is forked


class Popen(subprocess.Popen[Any]):
    """A process as subprocess has it; its parent is the warm interpreter, unless it needs one of its own."""

    _connection: socket.socket | None = None

    def _execute_child(self, *given: Any) -> None:
        command, _, preexec, _, pass_fds, cwd, environment, *_ = given
        ends = given[10:16]  # of stdin, stdout and stderr: what is read from and what is written to
        streams = [end if end != -1 else number for number, end in enumerate((ends[0], ends[3], ends[5]))]
        cold = preexec or pass_fds or os.environ.get(COLD_VARIABLE) or PADDLES_LAUNCHER in command
        if not cold and command[0] == sys.executable:
            self._connection = connected()
            request = {"command": command, "environment": dict(os.environ if environment is None else environment)}
            request["cwd"] = os.fspath(cwd or os.getcwd())
            socket.send_fds(self._connection, [json.dumps(request, default=os.fspath).encode()], streams)
            if pid := heard(self._connection)["pid"]:
                self.pid, self._child_created = pid, True
                self._close_pipe_fds(*ends)
                return
            self._connection.close()
            self._connection = None
        super()._execute_child(*given)

    def _internal_poll(self, *given: Any, **also: Any) -> int | None:
        return self._ended(0.0) if self._connection else super()._internal_poll(*given, **also)

    def _wait(self, timeout: float | None) -> int | None:
        if not self._connection:
            return super()._wait(timeout)
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._connection and can_read(self._connection, timeout):
            told = heard(self._connection)
            self._connection.close()
            self.returncode = told["code"]
            assert not told["left"], f"{self.args} has left behind: {told['left']}"
        return self.returncode


def run(command: Sequence[Any], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run it to its end and return what it wrote; killed after `timeout` seconds."""
    pipe = subprocess.PIPE
    with Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def connected() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{address()}")
    return connection


def can_read(stream: Any, timeout: float | None) -> bool:
    """Waits so long, in seconds; also of descriptors above 1,023, which `select.select` refuses."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return bool(selector.select(timeout))


def heard(connection: socket.socket) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(connection.recv(MOST))
    return told


@cache
def address() -> str:
    """Where the warm interpreter of this process listens; started with the first program, ended by its stdin's end."""
    name = f"gradsync-warm-{secrets.token_hex(8)}"
    command = [sys.executable, "-m", "tests.support.warm_server", name, " " * ROOM]
    server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(server.communicate)
    begun = time.monotonic()
    assert can_read(server.stdout, START_S), f"no warm interpreter after {START_S:g} s"
    line = server.stdout.readline() if server.stdout else b""
    assert line == b"ready\n", f"the warm interpreter said {line!r} after {time.monotonic() - begun:.1f} s"
    return name
