"""Shared memory between ranks of one host: each rank's own segments, and those of others, mapped once when needed."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from collective.mesh import Mesh
from collective.transport import Array
from common.memory import Segment

__all__ = ["CONTROL", "SharedSegments"]

CONTROL = 0  # number of the segment that a transport makes first, for itself; arrays lie in those from 1 on


class SharedSegments:
    """A rank's segments, numbered in the order of creation. Descriptors travel over the mesh's Unix sockets.

    Memory returns to the system when the group is closed and no array views it any longer.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._mine: list[Segment] = []
        self._by_address: list[tuple[int, int]] = []  # (address, number), sorted
        self._theirs: dict[tuple[int, int], Segment] = {}
        self._shared: set[tuple[int, int]] = set()  # (rank, number of mine)

    def create(self, nbytes: int) -> Segment:
        """A new segment of this rank.

        Raises:
            SharedMemoryTooSmall: the machine has not so much memory free.
        """
        segment = Segment(nbytes)
        self._by_address.append((segment.address, len(self._mine)))
        self._by_address.sort()
        self._mine.append(segment)
        return segment

    def empty(self, count: int, dtype: npt.DTypeLike) -> Array:
        """An uninitialised 1-D array in a segment of its own."""
        return self.create(count * np.dtype(dtype).itemsize).array(0, count, dtype)

    def locate(self, array: Array) -> tuple[int, int] | None:
        """(segment number, offset in bytes) of a contiguous array in this rank's segments; None elsewhere."""
        if not array.size:
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # half the time of array.ctypes.data
        at = bisect_right(self._by_address, (address, len(self._mine))) - 1
        if at < 0:
            return None
        start, number = self._by_address[at]
        offset = address - start
        return (number, offset) if offset + array.nbytes <= self._mine[number].nbytes else None

    def share(self, number: int, ranks: Iterable[int]) -> None:
        """Let other ranks map a segment of this one's; sent once to each."""
        for rank in ranks:
            if (rank, number) not in self._shared:
                self._shared.add((rank, number))
                segment = self._mine[number]
                self._mesh.share(rank, number, segment.nbytes, segment.descriptor)

    def of(self, rank: int, number: int) -> Segment:
        """A segment of this rank or another one, mapped at the first call; waits until its owner has shared it.

        Raises:
            PeerLost, PeerStalled: the owner did not.
        """
        if rank == self._mesh.rank:
            return self._mine[number]
        if (rank, number) not in self._theirs:
            descriptor, nbytes = self._mesh.take_segment(rank, number, "mapping its memory")
            self._theirs[rank, number] = Segment(nbytes, descriptor=descriptor)
        return self._theirs[rank, number]

    def close(self) -> None:
        """Give all descriptors back; arrays that are still used keep their memory."""
        for segment in [*self._mine, *self._theirs.values()]:
            segment.close()
