"""The processes of a job on a cluster of Ray's, as the driver sees them: like children, of which actors tell it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import PeerUnreachable
from common.launch.child import Child
from common.launch.hosts import START, command_of
from common.launch.job import Job
from common.launch.on_ray.cluster import Seats, lost_actors
from common.launch.on_ray.seat import News, Order
from common.launch.shown_log import ShownLog
from common.system.leftovers import GONE_S, Session
from common.system.private_files import open_private

__all__ = ["RayJob"]

NEWS_S = 0.5  # how long an actor may wait for some


class Remote:
    """A process on another node, in the place of a Popen."""

    stdin = stdout = None
    pid = 0

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        """With its actor."""
        import ray

        ray.kill(self.actor)

    def wait(self) -> None:
        """Nobody needs to."""


@dataclass
class RemoteChild(Child):
    """Args:
    host: its node's address.
    shown: its output goes to this terminal.
    lost: why its actor is gone; "": it is not.
    """

    host: str = ""
    shown: bool = False
    lost: str = ""
    frozen: bool = False
    killed: int = 0

    def look(self) -> None:
        """Its actor does."""

    def is_frozen(self) -> bool:
        return self.frozen

    def how_it_ended(self, killed: int) -> str:  # noqa: ARG002 - on this host
        if self.lost:
            return f"was lost on node {self.host}: {self.lost}"
        return f"{super().how_it_ended(self.killed)} on node {self.host}"

    def take(self, news: News, folder: Path) -> None:
        """Keep what its actor tells, in the files that a child of this host would write."""
        if self.shown and self.log is None:
            show(news)
        elif self.log is not None:
            append(self.log, news.out)
        append(self.joined, news.notes)
        append(self.words, news.words)
        for name, content in news.files.items():
            folder.joinpath(name).write_bytes(content)
        self.frozen, self.peak_bytes, self.killed = news.frozen, news.peak_bytes, news.killed
        self.process.returncode = news.code

    def lose(self, why: str) -> None:
        self.lost, self.process.returncode = why, -signal.SIGKILL


def append(path: Path, content: bytes) -> None:
    if content:
        with path.open("ab") as file:
            file.write(content)


def show(news: News) -> None:
    with suppress(OSError, ValueError):  # nobody reads it any longer
        for stream, content in ((sys.stdout, news.out), (sys.stderr, news.err)):
            stream.flush()
            stream.buffer.write(content)
            stream.buffer.flush()


@dataclass(kw_only=True)
class RayJob(Job):
    """Args:
    seats: where its processes run.
    """

    seats: Seats
    _asked: dict[Any, RemoteChild] = field(default_factory=dict)

    def __enter__(self) -> RayJob:
        super().__enter__()
        return self

    def start(  # type: ignore[override] # gives no Popen
        self,
        name: str,
        command: Sequence[str],
        *,
        log: str,
        environment: Mapping[str, str] | None = None,
        on_terminal: bool = False,
    ) -> None:
        """Have the actor of that name run `python COMMAND...`; arguments as of Job.start.

        Raises:
            PeerUnreachable: its actor is gone.
        """
        apart = on_terminal and self.log_dir is None
        path = None if apart else self._logs / log
        if path is not None:
            open_private(path, further=self.life.number > 0).close()
            if on_terminal:
                self._shown[path] = ShownLog(path)
        actor, host = self.seats.actors[name], self.seats.hosts[name]
        order = Order(
            name, [*command], {**(environment or {})}, str(START), str(self.scratch), os.getcwd(), host, apart
        )
        words, joined = self.scratch / f"words of {name}", self.scratch / f"{name} joined"
        process: Any = Remote(actor)
        child = RemoteChild(name, process, Session(0, None), path, words, joined, host=host, shown=on_terminal)
        self.children.append(child)
        self._asked[actor.start.remote(order)] = child

    def start_ranks(self, script: Sequence[str], trainer: Sequence[str], environment: Mapping[str, str]) -> None:
        """Arguments as of `hosts.start_rank`."""
        for rank in range(self.seats.nranks):
            self.start(
                f"rank {rank}",
                command_of(script, trainer, rank),
                log=f"workerlog.{rank}",
                environment={**self.seats.environment(rank), **environment},
                on_terminal=rank == 0,
            )

    def _ask(self, child: RemoteChild) -> None:
        self._asked[self.seats.actors[child.name].news.remote(NEWS_S)] = child

    def _mark_ended(self) -> None:
        self._hear()
        super()._mark_ended()

    def _hear(self) -> None:
        """Take what actors have told by now.

        Raises:
            UsageError: a process cannot start on its node.
        """
        import ray

        if not self._asked:
            return
        told, _ = ray.wait([*self._asked], num_returns=len(self._asked), timeout=0)
        for ref in told:
            child = self._asked.pop(ref)
            try:
                with lost_actors(PeerUnreachable):
                    news = ray.get(ref)  # None: it has started
                if news is not None:
                    child.take(news, self.scratch)
            except PeerUnreachable as exc:
                child.lose(str(exc))
            if child.code is None:
                self._ask(child)

    def _end(self, children: Sequence[Child]) -> None:
        import ray

        running = [child for child in children if child.code is None]
        with suppress(Exception):  # of actors that are gone
            ended = [self.seats.actors[child.name].end.remote() for child in running]
            ray.wait(ended, num_returns=len(ended), timeout=NEWS_S + self.patience + GONE_S)
