"""What both ways share in which barrier.py has ranks meet: where they write, and how one waits while it looks for who
has died."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from collective.membership.liveness import Mesh
from common.errors import GradSyncError
from common.system.memory import Segment
from common.system.semaphore import SEMAPHORE_BYTES, Semaphore

__all__ = ["CONTROL_BYTES", "LINE_BYTES", "NOTE_BYTES", "Control", "Lines", "Meetings"]

NOTE_BYTES = 48
LINE_BYTES = 64  # a cache line, whose rest is the meeting's
MEETINGS_AT = 2 * SEMAPHORE_BYTES
COMPILED_AT = MEETINGS_AT + LINE_BYTES
CONTROL_BYTES = COMPILED_AT + LINE_BYTES
SLICE_S = 0.05  # a sleeping rank looks this often whether somebody died


class Control:
    """What each rank owns and all see, at byte `at` of a segment, whose memory is zero at first.

    arrived    2 semaphores: another rank has come to a meeting (posted by it, waited on by the owner)
    meetings   at how many meetings the owner has posted to all; only to find who is late
    compiled   1 if the owner has compiled meetings; written before the first meeting
    crowded    1 if it sees fewer cores than ranks; likewise
    """

    def __init__(self, segment: Segment, at: int, *, create: bool = False) -> None:
        self.arrived = [Semaphore(segment, at + i * SEMAPHORE_BYTES, create=create) for i in range(2)]
        self.meetings = segment.array(at + MEETINGS_AT, 8, np.uint8).data.cast("Q")
        self.compiled = segment.array(at + COMPILED_AT, 8, np.uint8).data.cast("Q")
        self.crowded = segment.array(at + COMPILED_AT + 8, 8, np.uint8).data.cast("Q")


class Lines:
    """2 lines for each rank, written by it and read by all, used in turn; and one that says whether it sleeps."""

    def __init__(self, segment: Segment, start: int, nranks: int) -> None:
        size = nranks * LINE_BYTES
        self.halves: list[npt.NDArray[np.uint8]] = [segment.array(start + i * size, size, np.uint8) for i in range(2)]
        self.sleepers: npt.NDArray[np.uint8] = segment.array(start + 2 * size, size, np.uint8)

    @staticmethod
    def nbytes(nranks: int) -> int:
        return 3 * nranks * LINE_BYTES


class Meetings(ABC):
    """One rank's part. Ranks are counted from 0 within the host.

    Blocking methods raise PeerLost or PeerStalled, naming the rank of the group that is at fault.

    Args:
        ranks: of the group, those that meet here.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[int], rank: int) -> None:
        self._mesh, self._ranks = mesh, ranks
        self.rank, self.nranks = rank, len(ranks)
        self._others = [r for r in range(len(ranks)) if r != rank]

    @property
    @abstractmethod
    def turn(self) -> int:
        """Which of two places what is posted for the coming meeting goes to: 0 or 1."""

    @abstractmethod
    def exchange(self, note: bytes) -> Sequence[bytes] | None:
        """Meet, with a note of NOTE_BYTES; returns all ranks' in rank order, or None if all are equal."""

    @abstractmethod
    def meet(self) -> None:
        """Block until every rank has come."""

    @abstractmethod
    def _late(self) -> list[int]:
        """Of `others`, those that have not come, as far as is seen."""

    def _wait_longer(self, arrived: Callable[[], bool], sleep: Callable[[float], object]) -> None:
        """Until `arrived`, looking for who died meanwhile."""
        self._look_until(arrived, sleep)
        self._mesh.stop_waiting()

    def _look_until(self, arrived: Callable[[], bool], sleep: Callable[[float], object]) -> None:
        since = time.monotonic() - SLICE_S
        while True:
            late = [self._ranks[r] for r in self._late()]
            gone = [r for r in late if self._mesh.has_left(r)]
            try:
                self._mesh.check()
                if gone:
                    self._mesh.check(gone[0], "waiting for it")
            except GradSyncError:
                if arrived():  # one that came before it left, or failed, has come
                    return
                raise
            if arrived():
                return
            sleep(SLICE_S)
            if arrived():
                return
            if late:  # else all have come, and only this call isn't done
                self._mesh.wait_on(late[0], "waiting for it", since)
