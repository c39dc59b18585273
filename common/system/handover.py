"""Memory handed from one process to another of the same user: descriptors of segments over Unix sockets.

Nothing is opened by a name that another process chose: the descriptor itself comes with the message (SCM_RIGHTS), from
a peer whose user the kernel tells (SO_PEERCRED), and `Segment` takes only what nobody can resize.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections.abc import Iterator

from common.system.memory import KEY_BYTES, Segment, Unreachable

__all__ = ["Handed", "Link", "check_user", "receive"]

LABEL = struct.Struct(f"<{KEY_BYTES}sQ")  # key, bytes
CREDENTIALS = struct.Struct("3i")  # process, user, group: unix(7)
Handed = tuple[bytes, int, int]  # (key, descriptor, bytes) of a segment


def check_user(connection: socket.socket) -> None:
    """
    Raises:
        Unreachable: the process at the other end of this Unix socket is of another user.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise Unreachable(f"they are of different users ({os.geteuid()} and {user})")


def receive(connection: socket.socket, nbytes: int, count: int) -> tuple[bytes, list[int]]:
    """At most so many bytes and descriptors; none of the latter outlives this process's program.

    Raises:
        OSError: as `recv`.
    """
    descriptors = array("i")  # socket.recv_fds forgets its flags
    room = socket.CMSG_LEN(count * descriptors.itemsize)
    data, extras, _, _ = connection.recvmsg(nbytes, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
    return data, list(descriptors)


class Link:
    """A connection by which two processes hand each other segments; a context manager. Nothing here waits: what the
    other one has handed over before it said so elsewhere is there.

    Args:
        connection: of type SOCK_SEQPACKET, which keeps messages apart.

    Raises:
        Unreachable: they are of different users. The connection is closed then.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._given: set[bytes] = set()
        try:
            check_user(connection)
        except Unreachable:
            connection.close()
            raise
        connection.setblocking(False)

    def give(self, segment: Segment) -> None:
        """Hand a segment over, once.

        Raises:
            Unreachable: the other process has gone.
        """
        if segment.key in self._given:
            return
        label = LABEL.pack(segment.key, segment.nbytes)
        try:
            socket.send_fds(self._connection, [label], [segment.descriptor])
        except OSError as exc:
            raise Unreachable(f"memory cannot be handed over ({exc.strerror})") from exc
        self._given.add(segment.key)

    def taken(self) -> Iterator[Handed]:
        """What has been handed over since the last call; the descriptors are the caller's."""
        while True:
            try:
                data, descriptors = receive(self._connection, LABEL.size + 1, 1)
            except OSError:  # nothing has come, or the other process has gone
                return
            if len(data) == LABEL.size and descriptors:
                key, nbytes = LABEL.unpack(data)
                yield key, descriptors[0], nbytes
                continue
            for descriptor in descriptors:
                os.close(descriptor)
            if not data:
                return

    def close(self) -> None:
        """What has been handed over stays."""
        self._connection.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
