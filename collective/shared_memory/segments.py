"""Shared memory between ranks of one host: each rank's own segments, and those of others, mapped once when needed."""

from __future__ import annotations

from collections.abc import Sequence

from collective.membership.liveness import Mesh
from common.errors import ProtocolError
from common.system.memory import Segment, SegmentPool, Unreachable

__all__ = ["CONTROL", "SharedSegments"]

CONTROL = 0  # number of the segment that a transport makes first, for itself; arrays lie in those from 1 on


class SharedSegments:
    """A rank's segments, numbered in the order of creation. Descriptors travel over the mesh's Unix sockets.

    Args:
        readers: the ranks that map what is offered.

    Memory returns to the system when the group is closed and no array views it any longer.
    """

    def __init__(self, mesh: Mesh, readers: Sequence[int]) -> None:
        self._mesh = mesh
        self._readers = readers
        self._mine = SegmentPool()
        self.create, self.empty, self.locate = self._mine.create, self._mine.empty, self._mine.locate
        self._theirs: dict[tuple[int, int], Segment] = {}
        self._offered: set[int] = set()  # numbers of mine
        self._shared: list[tuple[Segment, int]] = []  # and where it is mapped

    def offer(self, number: int) -> None:
        """Let the readers map a segment of this rank; sent once."""
        if number not in self._offered:
            self._offered.add(number)
            segment = self._mine.segments[number]
            for rank in self._readers:
                self._mesh.offer(rank, number, segment.nbytes, segment.descriptor)

    def of(self, rank: int, number: int) -> Segment:
        """A segment of this rank or another one, mapped at the first call; waits until its owner has offered it.

        Raises:
            PeerLost, PeerStalled: the owner did not.
            ProtocolError: what it shared is no such memory.
        """
        if rank == self._mesh.rank:
            return self._mine.segments[number]
        if (rank, number) not in self._theirs:
            descriptor, nbytes = self._mesh.take_segment(rank, number, "mapping its memory")
            try:
                self._theirs[rank, number] = Segment(nbytes, descriptor=descriptor)
            except Unreachable as exc:
                raise ProtocolError(f"the memory of rank {rank} cannot be mapped: {exc}") from exc
        return self._theirs[rank, number]

    def size_of(self, number: int) -> int:
        """Of a segment of this rank, in bytes."""
        return self._mine.segments[number].nbytes

    def share(self, number: int, rank: int, theirs: int) -> None:
        """Map a segment of `rank` (perhaps this one) in the place of this rank's `number`, of the same size: what views
        that has the other's memory from now on. `locate` no longer finds it.

        Raises:
            PeerLost, PeerStalled: the owner did not offer it.
        """
        segment, address = self.of(rank, theirs), self._mine.segments[number].address
        if rank != self._mesh.rank:
            segment.lay_over(address)
        self._mine.forget(number)
        self._shared.append((segment, address))

    def close(self) -> None:
        """Give all descriptors back. Arrays that are still used keep their memory; what was shared is now this
        process's own."""
        while self._shared:
            segment, address = self._shared.pop()
            segment.lay_over(address, private=True)
        self._mine.close()
        for segment in self._theirs.values():
            segment.close()
