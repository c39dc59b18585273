"""Framed messages over a TCP connection, both ways at once, by whoever has the time: nothing here waits.

A message is a header and its payload:

    magic, payload bytes, checksum, reserved    FRAME: 16 bytes; checksum: low half of XXH3 of tag and payload, or 0
    tag                                         as many bytes as the two ends have agreed on: what the payload is

`put` takes arrays as they are, without a copy; `push` gives the kernel what its buffer takes and keeps the rest. What
comes is received straight to where it belongs. So both directions can be full at once without a second thread, whose
switches cost more than the copies.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from common.network.sockets import on_loopback
from common.network.tls_sockets import is_encrypted

__all__ = ["CHECKSUMS", "FRAME", "MAGIC", "Link", "checksum_of"]

Array = npt.NDArray[Any]

FRAME = struct.Struct("<IIII")  # magic, payload bytes, checksum (0: none), reserved; the tag follows
CHECKSUMS = ("auto", "on", "off")
MAGIC = 0x47535931  # "GSY1"
MOST_PARTS = 16  # of messages, in one system call
WAKE_BYTES = 128 * 1024  # a sleeping receiver is woken when so much has come, or all it waits for


class Link:
    """One end of a connection. Not thread-safe.

    Args:
        connection: is set not to block.
        tag_bytes: how long the tag of each message is.
        checksum: one of CHECKSUMS; auto: off on loopback, and under TLS, which notices any damage; else on.
    """

    def __init__(self, connection: socket.socket, tag_bytes: int, *, checksum: str = "auto") -> None:
        self.connection = connection
        self.checksum = checksum_of(connection, checksum)
        self.header_bytes = FRAME.size + tag_bytes
        self.header = bytearray(self.header_bytes)  # of the message that is being received
        self.unsent: deque[memoryview] = deque()
        self._wakes_at = 1  # SO_RCVLOWAT
        self._most_awaited = 1 if is_encrypted(connection) else WAKE_BYTES  # TLS may have read a part of them already
        connection.setblocking(False)

    def put(self, array: Array, tag: bytes) -> None:
        """Send this contiguous array after all that was put before. It must keep its contents until it is sent."""
        self.unsent.append(memoryview(FRAME.pack(MAGIC, array.nbytes, self.checksum(array, tag), 0) + tag))
        if array.nbytes:
            self.unsent.append(memoryview(array.view(np.uint8).data))

    def push(self) -> bool:
        """Give the kernel as much as it takes at once; whether it took anything."""
        moved = False
        while self.unsent and self.push_some():
            moved = True
        return moved

    def push_some(self) -> bool:
        """Give the kernel, in one call, as much as it takes of the first messages; whether it took anything."""
        unsent = self.unsent
        try:
            sent = self.connection.sendmsg(list(islice(unsent, MOST_PARTS)))
        except BlockingIOError:
            return False
        except OSError:  # the other end is gone: whoever waits for it says so
            unsent.clear()
            return True
        while unsent and sent >= len(unsent[0]):
            sent -= len(unsent.popleft())
        if sent:
            unsent[0] = unsent[0][sent:]
        return True

    def receive(self, parts: Sequence[memoryview]) -> int:
        """Fill these one after the other with what has come; how many bytes that is. 0: the other end is gone.

        Raises:
            BlockingIOError: nothing has come.
        """
        try:
            return self.connection.recvmsg_into(parts)[0]
        except BlockingIOError:
            raise
        except OSError:
            return 0

    def wake_for(self, wanted: int) -> None:
        """Have the connection count as readable when `wanted` bytes (or many) have come."""
        wakes_at = min(wanted, self._most_awaited)
        if wakes_at != self._wakes_at:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)
            self._wakes_at = wakes_at

    @property
    def frame(self) -> tuple[int, int, int]:
        """Of the header that was received: magic, payload bytes, checksum."""
        magic, nbytes, checksum, _ = FRAME.unpack_from(self.header)
        return magic, nbytes, checksum

    @property
    def tag(self) -> bytes:
        """Of the header that was received."""
        return bytes(self.header[FRAME.size :])


def checksum_of(connection: socket.socket, choice: str) -> Callable[[Array, bytes], int]:
    """What the checksum of a payload and its tag is on this connection: 0 where there is none."""
    if choice == "off" or (choice == "auto" and (on_loopback(connection) or is_encrypted(connection))):
        return lambda array, tag: 0  # noqa: ARG005
    from xxhash import xxh3_64_intdigest  # ten times as fast as zlib.crc32

    def of(array: Array, tag: bytes) -> int:
        return xxh3_64_intdigest(array.view(np.uint8).data, xxh3_64_intdigest(tag)) & 0xFFFFFFFF

    return of
