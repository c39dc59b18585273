"""A barrier in shared memory, between processes of one host: every rank posts a note and some bytes, meets the others,
and reads theirs.

Each rank owns a control segment that all others map:

    arrived   2 semaphores: another rank has come to a meeting (posted by it, waited on by the owner)
    meetings  at how many meetings the owner has posted to all; only to find who is late
    halves    2 x HALF_BYTES of payload

rank 0's besides, which all write to:

    short     2 x SHORT_BYTES for each rank
    notes     2 x NOTE_BYTES for each rank

and as many data segments as `empty` made, mapped by the others when first needed. Nothing has a name.

Meetings use the pairs in turn. That one is enough: a rank comes to meeting k+1 only when it has done with what was
posted for meeting k, and so, after meeting k+1, all may overwrite it and post for meeting k+2.

    rank 0   write half 0 | meet | read all halves 0, write half 1 | meet | read all halves 1, write half 0 | ...
    rank 1   write half 0 | meet | read all halves 0, write half 1 | meet | read all halves 1, write half 0 | ...

What a rank wrote anywhere before a meeting is seen by all after it: every rank posts to every other and takes all N-1
posts to its own semaphore, which only atomic read-modify-writes change, so that whoever took the last one is ordered
after all of them (memory order: common/system/semaphore.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from collective.calls import Array
from collective.membership.liveness import Mesh
from collective.shared_memory.segments import CONTROL, SharedSegments
from common.system.memory import Segment
from common.system.semaphore import SEMAPHORE_BYTES, Semaphore

__all__ = ["HALF_BYTES", "NOTE_BYTES", "SHORT_BYTES", "SharedMemoryBarrier"]

NOTE_BYTES = 48
HALF_BYTES = 1 << 20
SHORT_BYTES = 1 << 14
MEETINGS_AT = 2 * SEMAPHORE_BYTES
HALVES_AT = 4096
CONTROL_BYTES = HALVES_AT + 2 * HALF_BYTES
SLICE_S = 0.05  # a sleeping rank looks this often whether somebody died


class Control:
    """The control segment of one rank, seen from any."""

    def __init__(self, segment: Segment, *, create: bool) -> None:
        self.arrived = [Semaphore(segment, i * SEMAPHORE_BYTES, create=create) for i in range(2)]
        self.meetings = segment.array(MEETINGS_AT, 8, np.uint8).data.cast("Q")
        self.halves = [segment.array(HALVES_AT + i * HALF_BYTES, HALF_BYTES, np.uint8) for i in range(2)]


class SharedMemoryBarrier:
    """One rank's part in it. Blocking methods raise PeerLost or PeerStalled, naming the rank at fault.

    Args:
        ranks: of the group, those that meet here. Here they are counted from 0: `rank` of `nranks`.

    `halves[turn][rank]`: what each rank posts for the coming meeting; write to one's own only.
    `halves[1 - turn][r]`: what rank r posted for the last one; to be read until the next.
    `short[turn]`, `short[1 - turn]`: likewise, but any rank may write to any part of it, as they have agreed.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[int]) -> None:
        self.rank, self.nranks = ranks.index(mesh.rank), len(ranks)
        self._mesh = mesh
        self.ranks = ranks
        self._others = [r for r in range(self.nranks) if r != self.rank]
        self._segments = SharedSegments(mesh, [ranks[r] for r in self._others])
        short, notes = self.nranks * SHORT_BYTES, self.nranks * NOTE_BYTES
        nbytes = CONTROL_BYTES if self.rank else CONTROL_BYTES + 2 * short + 2 * notes
        self._mine = Control(self._segments.create(nbytes), create=True)
        self._segments.offer(CONTROL)
        everyone = [
            self._mine if r == self.rank else Control(self._segments.of(ranks[r], CONTROL), create=False)
            for r in range(self.nranks)
        ]
        self._everyone = everyone
        self._posts = [[everyone[r].arrived[i].post for r in self._others] for i in range(2)]
        first = self._segments.of(ranks[0], CONTROL)
        notes_at = CONTROL_BYTES + 2 * short
        self.short = [first.array(CONTROL_BYTES + i * short, short, np.uint8) for i in range(2)]
        self._notes = [first.array(notes_at + i * notes, notes, np.uint8).data for i in range(2)]
        self._my_note = slice(self.rank * NOTE_BYTES, (self.rank + 1) * NOTE_BYTES)
        self.halves = [[control.halves[i] for control in everyone] for i in range(2)]
        self.turn = 0
        self._meetings = 0

    def empty(self, count: int, dtype: npt.DTypeLike) -> Array:
        """An uninitialised 1-D array, 64-byte aligned, that all ranks can reach."""
        return self._segments.empty(count, dtype)

    def locate(self, array: Array) -> tuple[int, int] | None:
        """(segment number, offset in bytes) by which `array_of` finds this array; None if it is not from `empty`."""
        where = self._segments.locate(array)
        if where is not None:
            self._segments.offer(where[0])
        return where

    def array_of(self, rank: int, number: int, offset: int, count: int, dtype: npt.DTypeLike) -> Array:
        """The memory that `rank` located so, as a 1-D array; waits until it is mapped."""
        return self._segments.of(self.ranks[rank], number).array(offset, count, dtype)

    def whole_segment(self, array: Array) -> int | None:
        """The number of the segment that this array is; None if it lies elsewhere, or beside something."""
        where = self.locate(array)
        return where[0] if where and where[1] == 0 and self._segments.size_of(where[0]) == array.nbytes else None

    def share(self, number: int, rank: int, theirs: int) -> None:
        """See SharedSegments."""
        self._segments.share(number, self.ranks[rank], theirs)

    def exchange(self, note: bytes) -> bytes:
        """Meet, and return all ranks' notes, of NOTE_BYTES each, in rank order."""
        notes = self._notes[self.turn]
        notes[self._my_note] = note
        self.meet()
        return notes.tobytes()

    def meet(self) -> None:
        """Block until every rank has come; each wait lasts at most the timeout."""
        turn = self.turn
        self._meetings += 1
        for post in self._posts[turn]:
            post()
        self._mine.meetings[0] = self._meetings  # last: who is counted as come holds nobody up
        arrived = self._mine.arrived[turn]
        for _ in self._others:
            if arrived.missed() and not arrived.wait(SLICE_S):
                self._wait_longer(arrived)
        self.turn = 1 - turn

    def close(self, reason: str = "") -> None:
        """Leave; a `reason` tells the other ranks that this one failed. Idempotent, never raises."""
        self._mesh.close(reason)
        self._segments.close()

    def _wait_longer(self, arrived: Semaphore) -> None:
        deadline = time.monotonic() + self._mesh.timeout - SLICE_S
        while True:
            self._mesh.check()
            late = self._late()
            gone = [r for r in late if self._mesh.has_left(r)]  # one that came before it left has come
            if arrived.wait(0 if gone else SLICE_S):
                return
            if gone:
                self._mesh.check(gone[0], "waiting for it")
            if time.monotonic() > deadline:
                raise self._mesh.stalled(late[0], "waiting for it")

    def _late(self) -> list[int]:
        return [self.ranks[r] for r in self._others if self._everyone[r].meetings[0] < self._meetings]
