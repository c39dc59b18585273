"""A barrier in shared memory, between processes of one host: every rank posts a note and some bytes, meets the others,
and reads theirs.

All map one board, which rank 0 has made. Each rank has a part of it:

    control   what meetings need (meetings/base.py)
    halves    2 x HALF_BYTES of payload

and all write to the rest:

    short     2 areas for what is short
    lines     the notes (meetings/base.py)

Besides, each has as many data segments as `empty` made, mapped by the others when first needed; not by more than
MOST_MAPPED ranks, which would have a descriptor for each rank. Nothing has a name.

Meetings use the pairs in turn. That one is enough: a rank comes to meeting k+1 only when it has done with what was
posted for meeting k, and so, after meeting k+1, all may overwrite it and post for meeting k+2.

    rank 0   write half 0 | meet | read all halves 0, write half 1 | meet | read all halves 1, write half 0 | ...
    rank 1   write half 0 | meet | read all halves 0, write half 1 | meet | read all halves 1, write half 0 | ...

What a rank wrote anywhere before a meeting is seen by all after it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from collective.call_tags import Array
from collective.membership.liveness import Mesh
from collective.shared_memory.meetings.base import CONTROL_BYTES, Control, Lines
from collective.shared_memory.meetings.compiled import CompiledMeetings, can_be_compiled
from collective.shared_memory.meetings.semaphores import SemaphoreMeetings
from collective.shared_memory.segments import SharedSegments
from common.errors import ProtocolError
from common.system.memory import ALIGNMENT_BYTES

__all__ = ["HALF_BYTES", "SharedMemoryBarrier"]

HALF_BYTES = 1 << 20
SHORT_BYTES = 1 << 14
CROWDED_BYTES = 1 << 18  # of all ranks together: with more ranks than cores a meeting costs more than most additions
HALVES_AT = 4096
PART_BYTES = HALVES_AT + 2 * HALF_BYTES
MOST_MAPPED = 64
assert CONTROL_BYTES <= HALVES_AT


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


class SharedMemoryBarrier:
    """One rank's part in it. Blocking methods raise PeerLost or PeerStalled, naming the rank at fault.

    Args:
        ranks: of the group, those that meet here. Here they are counted from 0: `rank` of `nranks`.

    `halves[turn][rank]`: what each rank posts for the coming meeting; write to one's own only.
    `halves[1 - turn][r]`: what rank r posted for the last one; to be read until the next.
    `short[turn]`, `short[1 - turn]`: likewise, but any rank may write to any part of it, as they have agreed.
    `short_bytes`: of what is short; each area has room for so many of each rank.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[int]) -> None:
        self.rank, self.nranks = ranks.index(mesh.rank), len(ranks)
        self._mesh = mesh
        self.ranks = ranks
        self._segments = SharedSegments(mesh)
        parts = [rank * PART_BYTES for rank in range(self.nranks)]
        short_at, short = self.nranks * PART_BYTES, max(self.nranks * SHORT_BYTES, CROWDED_BYTES)
        lines_at = short_at + 2 * short
        board = self._segments.board(
            lines_at + Lines.nbytes(self.nranks),
            ranks[0],
            lambda made: [Control(made, at, create=True) for at in parts],
        )
        self.short = [board.array(short_at + i * short, short, np.uint8) for i in range(2)]
        self.halves = [
            [board.array(at + HALVES_AT + i * HALF_BYTES, HALF_BYTES, np.uint8) for at in parts] for i in (0, 1)
        ]
        everyone = [Control(board, at) for at in parts]
        lines = Lines(board, lines_at, self.nranks)
        self.compiled: CompiledMeetings | None = None
        everyone[self.rank].compiled[0] = can_be_compiled()
        everyone[self.rank].crowded[0] = self.nranks > cores()
        by_semaphores = SemaphoreMeetings(mesh, ranks, self.rank, everyone, lines)
        by_semaphores.meet_first()
        crowded = any(control.crowded[0] for control in everyone)
        most = CROWDED_BYTES // self.nranks // ALIGNMENT_BYTES * ALIGNMENT_BYTES if crowded else 0
        self.short_bytes = max(SHORT_BYTES, most)
        if all(control.compiled[0] for control in everyone):
            self.compiled = CompiledMeetings(mesh, ranks, self.rank, everyone, lines)
        self.meetings = self.compiled or by_semaphores
        self.meet, self.exchange = self.meetings.meet, self.meetings.exchange

    @property
    def turn(self) -> int:
        return self.meetings.turn

    def empty(self, count: int, dtype: npt.DTypeLike) -> Array:
        """An uninitialised 1-D array, 64-byte aligned, that all ranks can reach."""
        return self._segments.empty(count, dtype)

    def locate(self, array: Array) -> tuple[int, int] | None:
        """(segment number, offset in bytes) by which `array_of` finds this array; None if it is not from `empty`, or if
        there are more than MOST_MAPPED ranks."""
        if self.nranks > MOST_MAPPED:
            return None
        where = self._segments.locate(array)
        if where is not None:
            self._segments.offer(where[0])
        return where

    def array_of(self, rank: int, number: int, offset: int, count: int, dtype: npt.DTypeLike) -> Array:
        """The memory that `rank` located so, as a 1-D array; waits until it is mapped.

        Raises:
            ProtocolError: it is not as large.
        """
        segment, size = self._segments.of(self.ranks[rank], number), np.dtype(dtype).itemsize
        if offset % size or offset + count * size > segment.nbytes:
            raise ProtocolError(
                f"rank {rank} has an array of {count * size:,} bytes at {offset:,} of a memory of {segment.nbytes:,}"
            )
        return segment.array(offset, count, dtype)

    def whole_segment(self, array: Array) -> int | None:
        """The number of the segment that this array is; None if it lies elsewhere, or beside something."""
        where = self.locate(array)
        return where[0] if where and where[1] == 0 and self._segments.size_of(where[0]) == array.nbytes else None

    def share(self, number: int, rank: int, theirs: int) -> None:
        """See SharedSegments."""
        self._segments.share(number, self.ranks[rank], theirs)

    def close(self, reason: str = "") -> None:
        """Leave; a `reason` tells the other ranks that this one failed. Idempotent, never raises."""
        self._mesh.close(reason)
        self._segments.close()
