"""Meetings by semaphores of the C library.

Every rank posts to every other and takes all N-1 posts to its own semaphore, which only atomic read-modify-writes
change, so that whoever took the last one is ordered after all of them (memory order: common/system/semaphore.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from collective.membership.liveness import Mesh
from collective.shared_memory.meetings.base import LINE_BYTES, NOTE_BYTES, SLICE_S, Control, Lines, Meetings
from common.system.semaphore import Semaphore

__all__ = ["SemaphoreMeetings"]

REST = bytes(LINE_BYTES - NOTE_BYTES)


class SemaphoreMeetings(Meetings):
    turn = 0

    def __init__(self, mesh: Mesh, ranks: Sequence[int], rank: int, everyone: Sequence[Control], lines: Lines) -> None:
        super().__init__(mesh, ranks, rank)
        self._everyone = everyone
        self._mine = everyone[rank]
        self._posts = [[everyone[r].arrived[i].post for r in self._others] for i in range(2)]
        self._lines = [half.data for half in lines.halves]
        self._my_line = slice(rank * LINE_BYTES, (rank + 1) * LINE_BYTES)
        self._meetings = 0

    def meet_first(self) -> None:
        """At the pair that compiled meetings do not sleep at: whoever is slow to leave takes no post of theirs."""
        self.turn = 1
        self.meet()

    def exchange(self, note: bytes) -> Sequence[bytes] | None:
        lines, mine = self._lines[self.turn], note + REST
        lines[self._my_line] = mine
        self.meet()
        everyones = lines.tobytes()
        if everyones == mine * len(self._ranks):
            return None
        return [everyones[at : at + NOTE_BYTES] for at in range(0, len(everyones), LINE_BYTES)]

    def meet(self) -> None:
        turn = self.turn
        self._meetings += 1
        for post in self._posts[turn]:
            post()
        self._mine.meetings[0] = self._meetings  # last: who is counted as come holds nobody up
        arrived = self._mine.arrived[turn]
        for _ in self._others:
            if arrived.missed() and not arrived.wait(SLICE_S):
                self._take(arrived)
        self.turn = 1 - turn

    def _take(self, arrived: Semaphore) -> None:
        """A post that has not come within a slice."""
        taken = False

        def take(seconds: float = 0) -> bool:
            nonlocal taken
            taken = taken or arrived.wait(seconds)
            return taken

        self._wait_longer(take, take)

    def _late(self) -> list[int]:
        return [r for r in self._others if self._everyone[r].meetings[0] < self._meetings]
