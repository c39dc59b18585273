"""Starts parameter servers as processes of a job."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.launch.child import ProcessFailed
from common.launch.job import POLL_S, Job
from common.network.patience import WAIT_LIMIT_S

__all__ = ["Servers", "start_servers", "wait_for_file"]

START_S = 30.0  # to import and to listen, however soon a silent process is to be noticed
PATIENCE_S = 5.0  # before a line about servers that are still starting, and between two


def start_servers(
    job: Job,
    count: int,
    *,
    nranks: int,
    timeout: float,
    wait_limit: float = WAIT_LIMIT_S,
    first: str = "127.0.0.1:0",
    hosts: Sequence[str] = (),
    data_port: int = 0,
    environment: Mapping[str, str] | None = None,
    checkpoint_dir: Path | None = None,
) -> list[str]:
    """Start `count` parameter servers and return their addresses; arguments as of Servers."""
    servers = Servers(
        job,
        count,
        nranks=nranks,
        timeout=timeout,
        wait_limit=wait_limit,
        first=first,
        hosts=hosts,
        data_port=data_port,
        environment=environment,
        checkpoint_dir=checkpoint_dir,
    )
    return servers.start_all()


@dataclass
class Servers:
    """The parameter servers of a job.

    Args:
        first: HOST:PORT of server 0; server I listens at port + I. With port 0 each takes a free one and tells which by
            a file, so that no port can be raced for.
        hosts: where each listens, if not all on that host.
        data_port: server 0's, of data connections; server I's is I further on; 0: each takes a free one.
    """

    job: Job
    count: int
    nranks: int
    timeout: float
    wait_limit: float = WAIT_LIMIT_S
    first: str = "127.0.0.1:0"
    hosts: Sequence[str] = ()
    data_port: int = 0
    environment: Mapping[str, str] | None = None
    checkpoint_dir: Path | None = None

    def start_all(self) -> list[str]:
        """Their addresses, once all listen. One that a signal kills before is started again, if the job may do so.

        Raises:
            ProcessFailed: one ended otherwise, or they took too long.
            RecoveryFailed: no restart is left.
        """
        for index in range(self.count):
            self.start(index)
        progress, limit = Progress(self._files()), max(self.timeout, START_S)

        def look() -> None:
            self._start_over()
            progress.look()

        while not (addresses := self.addresses()) or self._start_over():
            for file in self._files():
                wait_for_file(file, self.job, timeout=limit, meanwhile=look)
        return addresses

    def start(self, index: int) -> None:
        """This one."""
        host, _, port = self.first.rpartition(":")
        flags = [
            "--host",
            self.hosts[index] if self.hosts else host.strip("[]"),
            "--port",
            str(int(port) + index if int(port) else 0),
        ]
        flags += ["--data-port", str(self.data_port + index if self.data_port else 0)]
        flags += ["--shard", f"{index}/{self.count}", "--address-file", str(self._files()[index])]
        flags += ["--nranks", str(self.nranks), "--timeout", str(self.timeout), "--wait-limit", str(self.wait_limit)]
        flags += ["--checkpoint-dir", str(self.checkpoint_dir)] if self.checkpoint_dir else []
        command = ["-m", "ps.server", *flags]
        self.job.start(f"server {index}", command, log=f"serverlog.{index}", environment=self.environment)

    def _start_over(self) -> bool:
        """Start those again that a signal has killed, whom nobody has met yet; whether there were any."""
        dead = [child for child in self.job.children if child.code is not None]
        if not (dead and self.job.keeps and all((child.code or 0) < 0 for child in dead)):
            return False
        if not self.job.life.start_over(self.job.failure(), [child.name for child in dead]):
            return False
        for child in dead:
            self.job.end(child.process)
            index = int(child.name.removeprefix("server "))
            self._files()[index].unlink(missing_ok=True)
            self.start(index)
        return True

    def forget_addresses(self) -> None:
        """All listen anew."""
        for file in self._files():
            file.unlink(missing_ok=True)

    def addresses(self) -> list[str]:
        """Where they listen; [] while one does not yet."""
        found = [text_of(file) for file in self._files()]
        return [text.strip() for text in found] if all(text.endswith("\n") for text in found) else []

    def _files(self) -> list[Path]:
        return [self.job.scratch / f"server-{index}" for index in range(self.count)]


class Progress:
    """Says how many servers are ready, every PATIENCE_S seconds, as long as it is asked to look."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._begin = self._told = time.monotonic()

    def look(self) -> None:
        now = time.monotonic()
        if now < self._told + PATIENCE_S:
            return
        self._told = now
        ready = sum(file.exists() for file in self._files)
        print(
            f"gradsync: starting servers: {ready} of {len(self._files)} ready after {now - self._begin:.0f} s",
            file=sys.stderr,
        )


def text_of(path: Path) -> str:
    """What a file holds; "" if there is none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def wait_for_file(path: Path, job: Job, *, timeout: float, meanwhile: Callable[[], None] = lambda: None) -> str:
    """The content of a file that a child of `job` writes once it is ready.

    Args:
        meanwhile: called again and again while there is none, before a child that ended is an error.

    Raises:
        ProcessFailed: a child ended instead, or `timeout` seconds passed.
    """
    deadline = time.monotonic() + timeout
    while not (text := text_of(path)).endswith("\n"):
        meanwhile()
        job.check()
        if time.monotonic() > deadline or all(child.code is not None for child in job.children):
            what = f"{path.name.replace('-', ' ')} was not ready within {timeout:g} s"
            raise ProcessFailed(f"{what}; start fewer processes, or raise --timeout", 1)
        time.sleep(POLL_S)
    return text.strip()
