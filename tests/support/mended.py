"""A job of three ranks on one host, whose launcher replaces the dead: by processes that sleep, and notes by hand."""

from __future__ import annotations

import time
from collections.abc import Callable

from common.commit.kept_parts import KeptParts, path_of
from common.launch.child import Child
from common.launch.job import Job
from common.launch.replacing import Replacing
from tests.support.jobs import PAUSE, ByHand, start

__all__ = ["Mended", "until"]

LIMIT_S = 20.0


class Mended(ByHand):
    """A job of three ranks, all of which have kept a boundary."""

    def __init__(self, job: Job) -> None:
        self.job, self.places, self.now = job, [""] * 0, 0.0
        self.replacing = Replacing(job, self.start, 30.0, clock=lambda: self.now)
        for rank in range(3):
            start(job, rank, PAUSE)
            KeptParts(path_of(job.kept[f"rank {rank}"])).write(0, b"")
            self.note(rank, "3", "complete")

    def start(self, rank: int, place: str) -> None:
        self.places.append(place)
        start(self.job, rank, PAUSE)

    def rank(self, rank: int) -> Child:
        return next(child for child in self.job.children if child.name == f"rank {rank}")

    def look(self) -> bool:
        self.now += 1.0
        return self.replacing.look()

    def wait(self, *ranks: int, epoch: int = 1) -> None:
        for rank in ranks:
            self.note(rank, f"waits {epoch} PeerLost: rank 1 died")

    def replace_rank_1(self) -> None:
        """It is killed and started again, and the others have the word to go on."""
        self.kill(1)
        self.wait(0, 2)
        assert self.look()
        self.note(1, "3")
        assert self.look()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
