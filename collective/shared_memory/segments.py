"""Shared memory between ranks of one host: a board of them all, and each rank's own segments, which the others map once
when needed."""

from __future__ import annotations

from collections.abc import Callable

from collective.call_tags import Array
from collective.membership.liveness import Mesh
from common.errors import ProtocolError
from common.system.memory import Segment, SegmentPool, Unreachable

__all__ = ["SharedSegments"]

BOARD = 0  # the number of the first rank's segment that all map; arrays lie in those from 1 on


class SharedSegments:
    """A rank's segments, numbered in the order of creation. Descriptors travel over the mesh's Unix sockets.

    Memory returns to the system when the group is closed and no array views it any longer.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._mine = SegmentPool()
        self._boards: list[Segment] = []  # made here
        self.empty = self._mine.empty
        self._theirs: dict[tuple[int, int], Segment] = {}
        self._offered: set[int] = set()  # numbers of mine
        self._shared: list[tuple[Segment, int]] = []  # and where it is mapped

    def board(self, nbytes: int, first: int, prepare: Callable[[Segment], object]) -> Segment:
        """The segment of all ranks that share memory, which rank `first` makes and prepares before the others see it.

        Raises:
            SharedMemoryTooSmall: the machine has not so much memory free.
            PeerLost, PeerStalled, ProtocolError: see `of`.
        """
        if first != self._mesh.rank:
            return self.of(first, BOARD)
        board = Segment(nbytes)
        self._boards.append(board)
        prepare(board)
        self._mesh.offer(BOARD, nbytes, board.descriptor)
        return board

    def locate(self, array: Array) -> tuple[int, int] | None:
        """(segment number, offset in bytes) of a contiguous array in one of this rank's segments; None elsewhere."""
        where = self._mine.locate(array)
        return where and (where[0] + 1, where[1])

    def offer(self, number: int) -> None:
        """Let the others map a segment of this rank; sent once."""
        if number not in self._offered:
            self._offered.add(number)
            segment = self._own(number)
            self._mesh.offer(number, segment.nbytes, segment.descriptor)

    def _own(self, number: int) -> Segment:
        return self._mine.segments[number - 1]

    def of(self, rank: int, number: int) -> Segment:
        """A segment of this rank or another one, mapped at the first call; waits until its owner has offered it.

        Raises:
            PeerLost, PeerStalled: the owner did not.
            ProtocolError: what it shared is no such memory.
        """
        if rank == self._mesh.rank:
            return self._own(number)
        if (rank, number) not in self._theirs:
            descriptor, nbytes = self._mesh.take_segment(rank, number, "mapping its memory")
            try:
                self._theirs[rank, number] = Segment(nbytes, descriptor=descriptor)
            except Unreachable as exc:
                raise ProtocolError(f"the memory of rank {rank} cannot be mapped: {exc}") from exc
        return self._theirs[rank, number]

    def size_of(self, number: int) -> int:
        """Of a segment of this rank, in bytes."""
        return self._own(number).nbytes

    def share(self, number: int, rank: int, theirs: int) -> None:
        """Map a segment of `rank` (perhaps this one) in the place of this rank's `number`, of the same size: what views
        that has the other's memory from now on. `locate` no longer finds it.

        Raises:
            PeerLost, PeerStalled: the owner did not offer it.
        """
        segment, address = self.of(rank, theirs), self._own(number).address
        if rank != self._mesh.rank:
            segment.lay_over(address)
        self._mine.forget(number - 1)
        self._shared.append((segment, address))

    def close(self) -> None:
        """Give all descriptors back. Arrays that are still used keep their memory; what was shared is now this
        process's own."""
        while self._shared:
            segment, address = self._shared.pop()
            segment.lay_over(address, private=True)
        self._mine.close()
        for segment in (*self._boards, *self._theirs.values()):
            segment.close()
