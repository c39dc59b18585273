"""The same-host data plane: a trainer and a server map one another's memory, so that gradients are not sent at all.

A `memfd` has no name, but the kernel shows it to other processes of the same user as /proc/PID/fd/N, so one message
with these two numbers is enough: nothing listens, and nothing is left after `kill -9`. Device and inode, within one
boot of one kernel, make sure that the right file was opened. Trainers in other containers (PID namespaces) cannot be
reached so; those in other network namespaces are taken for what they play, other hosts.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from common.network.gradsync_pb2 import Memory, Place
from common.system.addresses import boot_id
from common.system.memory import Segment, SegmentPool
from common.tensors.arena import FloatArray

__all__ = ["OthersMemory", "Unreachable", "place_of", "probe_of"]


class Unreachable(Exception):
    """Why another process's memory cannot be mapped, in words."""


def probe_of(segment: Segment) -> Memory:
    """By what another process of this host finds a segment."""
    status = os.fstat(segment.descriptor)
    return Memory(
        pid=os.getpid(),
        descriptor=segment.descriptor,
        host=host_id(),
        device=status.st_dev,
        inode=status.st_ino,
        size=segment.nbytes,
    )


def place_of(array: npt.NDArray[Any], pool: SegmentPool) -> Place:
    """By what another process finds an array; no memory at all if it is empty or does not lie in the pool."""
    where = pool.locate(array)
    return Place(memory=probe_of(pool.segments[where[0]]), offset=where[1]) if where else Place()


class OthersMemory:
    """Segments of other processes, each mapped once; a context manager."""

    def __init__(self) -> None:
        self._mapped: dict[bytes, Segment] = {}

    def segment(self, memory: Memory) -> Segment:
        """
        Raises:
            Unreachable: this process cannot map it.
        """
        key = memory.SerializeToString(deterministic=True)
        if key not in self._mapped:
            self._mapped[key] = Segment(memory.size, descriptor=open_descriptor(memory))
        return self._mapped[key]

    def array(self, place: Place, count: int) -> FloatArray:
        """`count` words at a place.

        Raises:
            Unreachable: this process cannot map it, or it is not as large.
        """
        if not count:
            return np.empty(0, np.float32)
        if place.offset + 4 * count > place.memory.size:
            raise Unreachable(f"{4 * count:,} bytes at {place.offset:,} of a memory of {place.memory.size:,}")
        array: FloatArray = self.segment(place.memory).array(place.offset, count, "float32")
        return array

    def close(self) -> None:
        """Give the descriptors back; arrays that are still used keep their memory."""
        while self._mapped:
            self._mapped.popitem()[1].close()

    def __enter__(self) -> OthersMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_descriptor(memory: Memory) -> int:
    if memory.host != host_id():
        raise Unreachable("they are on different hosts")
    try:
        descriptor = os.open(f"/proc/{memory.pid}/fd/{memory.descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise Unreachable(f"process {memory.pid} is in another container or of another user ({exc.strerror})") from exc
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino, status.st_size) != (memory.device, memory.inode, max(memory.size, 1)):
        os.close(descriptor)
        raise Unreachable("they are in different containers")
    return descriptor


@cache
def host_id() -> str:
    return f"{boot_id()} {os.readlink('/proc/self/ns/net')}"
