"""Launchers of two hosts in one process: jobs that only sleep, notes by hand, and a stream without a network."""

from __future__ import annotations

from typing import Any

from common.commit.kept_parts import KeptParts, path_of
from common.launch.child import Child
from common.launch.crew import CrewHere
from common.launch.following import Following
from common.launch.job import Job
from common.launch.remote_crew import RemoteCrew
from common.launch.replacing import Replacing
from common.launch.servers import Servers
from common.network.rendezvous import Membership
from common.system.next_epoch import Word, word_in
from tests.support.jobs import PAUSE, start
from tests.support.line import Line

__all__ = ["PLACE", "Company", "Two"]

PLACE = "10.0.0.1:8600"


class Company:
    """With another launcher, who is not met."""

    def __init__(self, stream: Line) -> None:
        self._stream = stream

    def stream(self, host: int) -> Line:
        return self._stream

    def meet(self, address: str, note: bytes, timeout: float) -> Membership:
        return Membership((PLACE, PLACE), b"", (note, note))


class Served(Servers):
    """One that only sleeps."""

    def start(self, index: int) -> None:
        self.job.start(f"server {index}", ["-c", PAUSE], log=f"serverlog.{index}")


class Two:
    """Jobs of two hosts, with two ranks each, all of which have kept a boundary; each has its launcher's view.

    Args:
        served: the ranks meet at a server, which is on the first host.
    """

    def __init__(self, first: Job, second: Job, *, served: bool = False) -> None:
        self.jobs, self.places, self.now = (first, second), [""] * 0, 0.0
        near, far = Line(), Line()
        near.other, far.other = far, near
        self.near: Any = near
        self.far: Any = far
        remote = RemoteCrew(self.near, range(2, 4), 0, clock=lambda: self.now)
        servers = Served(first, 1, nranks=4, timeout=30.0) if served else None
        self.first = Replacing(first, self.start, 30.0, servers, [remote], PLACE, clock=lambda: self.now)
        here = CrewHere(second, self.start, clock=lambda: self.now)
        self.second = Following(here, self.far, clock=lambda: self.now)
        for rank in range(4):
            job = self.jobs[rank // 2]
            start(job, rank, PAUSE)
            KeptParts(path_of(job.kept[f"rank {rank}"])).write(0, b"")
            self.note(rank, "4", "complete")
        if servers:
            servers.start(0)
            KeptParts(path_of(first.kept["server 0"])).write(0, b"")

    def start(self, rank: int, place: str) -> None:
        self.places.append(f"{rank} {place}")
        start(self.jobs[rank // 2], rank, PAUSE)

    def rank(self, rank: int) -> Child:
        return next(child for child in self.jobs[rank // 2].children if child.name == f"rank {rank}")

    def note(self, rank: int, *lines: str) -> None:
        with self.rank(rank).joined.open("a") as out:
            out.writelines(f"{line}\n" for line in lines)

    def kill(self, rank: int) -> None:
        self.rank(rank).process.kill()
        self.rank(rank).process.wait()

    def wait(self, *ranks: int, epoch: int = 1) -> None:
        for rank in ranks:
            self.note(rank, f"waits {epoch} PeerLost: rank 3 died")

    def end(self, rank: int) -> None:
        """Well."""
        self.kill(rank)
        self.rank(rank).process.returncode = 0

    def look(self) -> tuple[bool, bool]:
        """Each launcher twice, so that either has heard the other: whether each mends then."""
        self.now += 1.0
        self.second.look()
        self.first.look()
        second = self.second.look()
        return self.first.look(), second

    def words(self) -> list[Word | None]:
        return [word_in(job.word_file) for job in self.jobs]

    def loses(self, rank: int) -> None:
        """It is replaced, up to where it has joined."""
        self.kill(rank)
        self.wait(*({0, 1, 2, 3} - {rank}))
        assert self.look() == (True, True)
