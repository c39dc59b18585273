"""Launchers of two hosts in one process: jobs that only sleep, notes by hand, and a stream without a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.commit.kept_parts import KeptParts, path_of
from common.errors import RecoveryFailed
from common.launch.child import Child
from common.launch.crew import CrewHere
from common.launch.following import Following
from common.launch.job import Job
from common.launch.remote_crew import RemoteCrew
from common.launch.replacing import Replacing
from common.launch.restarts import Life, RestartFlags, supervise
from common.launch.servers import Servers
from common.network.rendezvous import Membership
from common.system.next_epoch import Word, word_in
from tests.support.jobs import PAUSE, ByHand, start
from tests.support.line import Line

__all__ = ["PLACE", "Company", "Two", "on_two"]


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


class Hosts:
    """In the place of a Place: launchers that meet again, with a newcomer in the place of the second host's.

    Args:
        of: the launchers.
    """

    def __init__(self, of: Two) -> None:
        self._of, self.met = of, [0] * 0
        self.newcomer: Job | None = None  # its job
        self.node = None

    def meet_again(self, epoch: int, cause: str) -> None:
        if self.newcomer is None:
            raise RecoveryFailed(f"{cause}; then the launchers of all hosts did not meet: 1 of 2 came within 60 s")
        self.met.append(epoch)
        self._of.take_in(self.newcomer)

    def stream(self, host: int) -> Any:
        assert host == 1
        return self._of.near


class Two(ByHand):
    """Jobs of two hosts, with two ranks each, all of which have kept a boundary; each has its launcher's view.

    Args:
        served: the ranks meet at a server, which is on the first host.
    """

    def __init__(self, first: Job, second: Job, *, served: bool = False) -> None:
        self.jobs, self.places, self.now = [first, second], [""] * 0, 0.0
        self.connect()
        self.hosts: Any = Hosts(self)
        remote = RemoteCrew(self.near, range(2, 4), 0, clock=lambda: self.now)
        servers = Served(first, 1, nranks=4, timeout=30.0) if served else None
        self.first = Replacing(first, self.start, 30.0, servers, [remote], PLACE, self.hosts, clock=lambda: self.now)
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

    def connect(self) -> None:
        """The two launchers."""
        near, far = Line(), Line()
        near.other, far.other = far, near
        self.near: Any = near
        self.far: Any = far

    def take_in(self, job: Job) -> None:
        """A launcher that has come in the place of the second host's, and starts its ranks."""
        self.connect()
        self.jobs[1] = job
        self.second = Following(CrewHere(job, self.start, clock=lambda: self.now), self.far, clock=lambda: self.now)
        for rank in (2, 3):
            start(job, rank, PAUSE)

    def start(self, rank: int, place: str) -> None:
        self.places.append(f"{rank} {place}")
        start(self.jobs[rank // 2], rank, PAUSE)

    def rank(self, rank: int) -> Child:
        return next(child for child in self.jobs[rank // 2].children if child.name == f"rank {rank}")

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


def on_two(what: Callable[[Two], None], most: tuple[int, int] = (2, 2), *, served: bool = False) -> None:
    """Do this with jobs of two hosts, which may be started again so often."""

    def live_first(first: Life) -> None:
        def live_second(second: Life) -> None:
            with (
                Job(life=first, keeps=True, patience=0.2, all_ranks_here=False) as job,
                Job(life=second, keeps=True, patience=0.2, all_ranks_here=False) as other,
            ):
                what(Two(job, other, served=served))

        supervise(RestartFlags(max_restarts=most[1]), live_second, prog="host 1")

    supervise(RestartFlags(max_restarts=most[0]), live_first, prog="host 0")
