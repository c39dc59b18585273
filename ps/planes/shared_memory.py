"""The same-host data plane: a trainer and a server map one another's memory, so that gradients are not sent at all.

A server has a desk: a Unix socket in Linux's abstract namespace, which ends with its process and its network namespace.
Trainers of the same user come there and hand in descriptors of their segments; on the same connection they get the
server's. Messages then name a segment by its random key, which means nothing to whoever was not handed it. Who does
not reach the desk, being on another host or of another user, goes over gRPC.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from common.network.gradsync_pb2 import Memory, Place
from common.system.handover import Handed, Link
from common.system.memory import Segment, SegmentPool, Unreachable
from common.tensors.arena import FloatArray

__all__ = ["Desk", "OthersMemory", "memory_of", "place_of"]

BACKLOG = 128  # visitors that wait to be let in


def memory_of(segment: Segment) -> Memory:
    """By what a process that was handed a segment finds it."""
    return Memory(key=segment.key, size=segment.nbytes)


def place_of(array: npt.NDArray[Any], pool: SegmentPool, give: Callable[[Segment], None]) -> Place:
    """By what processes that `give` hands the array's memory find it; no memory at all if it is empty or does not lie
    in the pool."""
    where = pool.locate(array)
    if where is None:
        return Place()
    segment = pool.segments[where[0]]
    give(segment)
    return Place(memory=memory_of(segment), offset=where[1])


class OthersMemory:
    """Segments that other processes have handed to this one, each mapped once, when first asked for; a context
    manager."""

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._givers: dict[bytes, Link] = {}  # by key, of all that has come
        self._waiting: dict[bytes, Handed] = {}  # to be mapped
        self._mapped: dict[bytes, Segment] = {}

    def visit(self, desk: str) -> Link:
        """A connection with the server that has its desk there.

        Raises:
            Unreachable: there is none on this host, or it is another user's.
        """
        if not desk:
            raise Unreachable("the server does not offer its memory")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect(f"\0{desk}")
        except ConnectionRefusedError as exc:
            connection.close()
            raise Unreachable("they are on different hosts") from exc
        except OSError as exc:
            connection.close()
            raise Unreachable(f"the server cannot be asked for its memory ({exc.strerror})") from exc
        return self._add(connection)

    def _add(self, connection: socket.socket) -> Link:
        self._links.append(Link(connection))
        return self._links[-1]

    def giver_of(self, memory: Memory) -> Link:
        """The connection by which it was handed over.

        Raises:
            Unreachable: it was not.
        """
        if memory.key not in self._givers:
            self._take()
        if memory.key not in self._givers:
            raise Unreachable("its memory was not handed over")
        return self._givers[memory.key]

    def segment(self, memory: Memory) -> Segment:
        """
        Raises:
            Unreachable: it was not handed over, or is not what it was said to be.
        """
        self.giver_of(memory)
        if handed := self._waiting.pop(memory.key, None):
            key, descriptor, nbytes = handed
            self._mapped[key] = Segment(nbytes, descriptor=descriptor, key=key)
        if memory.key not in self._mapped:
            raise Unreachable("its memory could not be mapped before")
        return self._mapped[memory.key]

    def array(self, place: Place, count: int) -> FloatArray:
        """`count` words at a place.

        Raises:
            Unreachable: this process cannot map it, or it is not as large.
        """
        if not count:
            return np.empty(0, np.float32)
        segment = self.segment(place.memory)
        if place.offset % 4:
            raise Unreachable(f"words do not begin at byte {place.offset:,}")
        if place.offset + 4 * count > segment.nbytes:
            raise Unreachable(f"{4 * count:,} bytes at {place.offset:,} of a memory of {segment.nbytes:,}")
        array: FloatArray = segment.array(place.offset, count, "float32")
        return array

    def _take(self) -> None:
        """All that has been handed over by now; what is known already is closed."""
        for link in self._links:
            for handed in link.taken():
                key, descriptor, _ = handed
                if key in self._givers:
                    os.close(descriptor)
                else:
                    self._givers[key], self._waiting[key] = link, handed

    def hang_up(self) -> None:
        """Close the connections; what was handed over stays."""
        for link in self._links:
            link.close()

    def close(self) -> None:
        """Give the descriptors back; arrays that are still used keep their memory."""
        self.hang_up()
        while self._waiting:
            _, descriptor, _ = self._waiting.popitem()[1]
            os.close(descriptor)
        while self._mapped:
            self._mapped.popitem()[1].close()

    def __enter__(self) -> OthersMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Desk(OthersMemory):
    """A server's: whoever of its user comes to the abstract Unix socket `name` can hand in memory, until it shuts."""

    def __init__(self) -> None:
        super().__init__()
        self.name = f"gradsync-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)

    def _take(self) -> None:
        with suppress(OSError):  # nobody else has come, or it is shut
            for _ in range(BACKLOG + 1):  # who has come by now is among these
                connection, _ = self._listener.accept()
                with suppress(Unreachable):  # a stranger
                    self._add(connection)
        super()._take()

    def shut(self) -> None:
        """Let nobody else in."""
        self._listener.close()

    def close(self) -> None:
        self.shut()
        super().close()
