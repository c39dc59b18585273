"""The processes of a case: started, watched by what they write, and gone when it is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.interceptor import Interception
from benchmarks.netlab.hosts import Hosts
from common.credentials.credentials import TOKEN_VARIABLE, environment_of, find, variable_of
from common.credentials.token import new_token
from common.errors import GradSyncError
from common.launch.ranks import abstract_address
from common.network.patience import WAIT_LIMIT_S
from common.system.process import RESTARTS_VARIABLE

__all__ = ["Failed", "Process", "Running"]

START_S, POLL_S = 40.0, 0.005


@dataclass(frozen=True)
class Failed:
    """How a rank has failed: the error's class, when (seconds, monotonic), and its words."""

    kind: str
    at: float
    words: str


class Process:
    def __init__(self, name: str, out: Path, command: Sequence[str], environment: dict[str, str]) -> None:
        self.name, self._out = name, out
        with out.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lines(self) -> list[str]:
        return self._out.read_text(errors="replace").splitlines()

    @property
    def steps(self) -> int:
        """How many it has made."""
        return next((int(line[5:]) for line in reversed(self.lines) if line.startswith("step ")), 0)

    @property
    def digest(self) -> str:
        """Of its parameters at the end; "" before."""
        return next((line[7:] for line in self.lines if line.startswith("digest ")), "")

    @property
    def failed(self) -> Failed | None:
        for line in self.lines:
            if line.startswith("failed "):
                head, _, words = line.partition(": ")
                _, kind, at = head.split()
                return Failed(kind, float(at), words)
        return None

    @property
    def gave_up(self) -> bool:
        """Whether it ended with an error of ours, in one line."""
        return any(line.startswith("ended by ") for line in self.lines[-1:])

    @property
    def over(self) -> bool:
        return self._process.poll() is not None

    def go(self) -> None:
        """A rank that is ready joins the others."""
        if self._process.stdin:
            self._process.stdin.close()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.communicate()


class Running:
    """A job of NumPy ranks under one scheme; a context manager.

    Args:
        hosts: where they run: rank r on host r, a server on host 0.
        scheme, backend: "ring" over shm or tcp, "ps" over shm, tcp or grpc.
        timeout, wait_limit: of all its processes, seconds.
        steps: after which a rank ends.
        secure: whether they have credentials; else --insecure.
        interception: of one of its messages.
    """

    def __init__(
        self,
        hosts: Hosts,
        scheme: str,
        backend: str,
        *,
        nranks: int = 2,
        timeout: float = 2.0,
        wait_limit: float = WAIT_LIMIT_S,
        steps: int = 10_000,
        secure: bool = True,
        interception: Interception | None = None,
    ) -> None:
        self._secure, self._interception = secure, interception
        self._hosts, self._scheme, self._backend = hosts, scheme, backend
        self.nranks, self.timeout, self._wait_limit, self._steps = nranks, timeout, wait_limit, steps
        self.ranks: list[Process] = []
        self.server: Process | None = None

    def __enter__(self) -> Running:
        self._folder = tempfile.TemporaryDirectory(prefix="gradsync-faults-")
        given = {TOKEN_VARIABLE: new_token()} if self._secure else {variable_of("insecure"): "1"}
        self._credentials = environment_of(find(environment=given))
        try:
            place = self._serve() if self._scheme == "ps" else self._meeting_place()
            for rank in range(self.nranks):
                worker = ["benchmarks.faults.worker", self._scheme, rank, self.nranks, place, self._backend]
                self.ranks.append(
                    self._start(f"rank {rank}", rank, [*worker, self.timeout, self._wait_limit, self._steps])
                )
            self.until(lambda: all(rank.lines for rank in self.ranks), START_S, "start of all ranks")
            for each in self.ranks:
                each.go()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.all():
            process.end()
        self._folder.cleanup()

    def at_step(self, step: int) -> None:
        """Wait until all ranks have made so many."""
        self.until(lambda: all(rank.steps >= step for rank in self.ranks), START_S, f"step {step}")

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait for it.

        Raises:
            GradSyncError: it did not come to that.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                last = {process.name: process.lines[-1:] for process in self.all()}
                raise GradSyncError(f"no {what} within {seconds:g} s: {last}")
            time.sleep(POLL_S)

    def all(self) -> list[Process]:
        return [*([self.server] if self.server else []), *self.ranks]

    def _meeting_place(self) -> str:
        if self._hosts.emulated:
            return self._hosts.endpoints([0])[0]
        return abstract_address("faults")

    def _serve(self) -> str:
        host = self._hosts.address(0)
        where = ["--host", host, "--port", 0, "--nranks", self.nranks, "--timeout", self.timeout]
        where += ["--wait-limit", self._wait_limit]
        self.server = self._start("server 0", 0, ["ps.server", *where])
        server = self.server
        self.until(lambda: any("listens on" in line for line in server.lines), START_S, "server")
        line = next(line for line in server.lines if "listens on" in line)
        return line.split(" listens on ")[1].split()[0]

    def _start(self, name: str, host: int, command: Sequence[object]) -> Process:
        what = self._interception
        if what and name == (f"rank {what.who}" if what.who >= 0 else "server 0"):
            command = ["benchmarks.faults.interceptor", what.kind, what.fate, what.number, *command]
        full = [*self._hosts.within(host), sys.executable, "-m", *map(str, command)]
        epoch = {RESTARTS_VARIABLE: "1"} if what else {}  # so that there is an old one
        environment = {**os.environ, **self._hosts.environment, **self._credentials, **epoch}
        return Process(name, Path(self._folder.name) / name, full, environment)
