"""The transport over TCP: framed messages, sent and received side by side by the calling thread alone.

A message is a header and its payload:

    magic, payload bytes, checksum, reserved    FRAME: 16 bytes; checksum: low half of the payload's XXH3, or 0
    tag                                         24 bytes (collective/calls.py)

`send` gives the kernel what its buffer takes and keeps the rest; whoever waits in `receive` or `flush` sends that on
meanwhile. So both directions are full at once without a second thread, whose switches cost more than the copies.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from collective.calls import Array, Tag
from collective.membership.liveness import Mesh
from collective.transports.base import Transport
from common.errors import ProtocolError
from common.network.sockets import on_loopback, poll_readable

__all__ = ["CHECKSUMS", "TcpTransport"]

FRAME = struct.Struct("<IIII")  # magic, payload bytes, checksum (0: none), reserved; the tag follows
CHECKSUMS = ("auto", "on", "off")
MAGIC = 0x47535931  # "GSY1"
HEADER_BYTES = FRAME.size + Tag.FORMAT.size
MOST_PARTS = 16  # of messages, in one system call
POLL_S = 0.05  # a sleeping rank looks so often for the dead
WAKE_BYTES = 128 * 1024  # a sleeping rank is woken when so much has come, or all it waits for


@dataclass
class Link:
    """The connection to one rank, both ways."""

    rank: int
    connection: socket.socket
    checksum: Callable[[Array], int]
    unsent: deque[memoryview] = field(default_factory=deque)
    header: bytearray = field(default_factory=lambda: bytearray(HEADER_BYTES))
    wakes_at: int = 1  # SO_RCVLOWAT


class TcpTransport(Transport):
    """Over one data connection to each rank that this one talks to.

    Args:
        checksum: one of CHECKSUMS; auto: on between hosts, off on loopback. Equal on all ranks.
    """

    piece_bytes = 512 * 1024

    def __init__(self, mesh: Mesh, connections: Mapping[int, socket.socket], *, checksum: str = "auto") -> None:
        self.rank, self.nranks = mesh.rank, mesh.nranks
        self._mesh = mesh
        self._links = {
            rank: Link(rank, connection, checksum_of(connection, checksum)) for rank, connection in connections.items()
        }
        for connection in connections.values():
            connection.setblocking(False)

    def send(self, rank: int, array: Array, tag: Tag) -> None:
        link = self._links[rank]
        link.unsent.append(memoryview(FRAME.pack(MAGIC, array.nbytes, link.checksum(array), 0) + tag.pack()))
        link.unsent.append(memoryview(array.view(np.uint8).data))
        push(link)

    def receive(self, rank: int, out: Array, tag: Tag) -> None:
        link = self._links[rank]
        payload = memoryview(out.view(np.uint8).data)
        got = self._receive_some(link, [memoryview(link.header), payload], HEADER_BYTES + len(payload))
        while got < HEADER_BYTES:
            missing = HEADER_BYTES - got
            parts = [memoryview(link.header)[got:], payload]
            got += self._receive_some(link, parts, missing + len(payload))
        self._check(link, out, tag)
        got -= HEADER_BYTES
        while got < len(payload):
            got += self._receive_some(link, [payload[got:]], len(payload) - got)
        _, _, sent, _ = FRAME.unpack_from(link.header)
        if (found := link.checksum(out)) != sent:
            raise ProtocolError(
                f"data from rank {rank} was damaged on its way to rank {self._mesh.rank} at step {tag.step}, bucket "
                f"{tag.bucket}: checksum {found:08x}, sent with {sent:08x}; look for a faulty network card or memory"
            )

    def flush(self) -> None:
        for link in self._links.values():
            deadline = time.monotonic() + self._mesh.timeout
            while link.unsent:
                if push(link) or self._wait(None, 0):
                    deadline = time.monotonic() + self._mesh.timeout
                else:
                    self._mesh.check(link.rank if self._mesh.has_left(link.rank) else None, "sending")
                    if time.monotonic() > deadline:
                        raise self._mesh.stalled(link.rank, "sending")

    def close(self, reason: str = "") -> None:
        """As Transport says; what was sent before a good end still arrives."""
        self._mesh.close(reason)
        for link in self._links.values():
            link.connection.close()

    def _check(self, link: Link, out: Array, tag: Tag) -> None:
        magic, nbytes, _, _ = FRAME.unpack_from(link.header)
        if magic != MAGIC:
            raise ProtocolError(f"rank {link.rank} sent something that is not a GradSync frame")
        tag.check(Tag.unpack(bytes(link.header[FRAME.size :])), link.rank)
        tag.check_size(nbytes, out.nbytes, link.rank)

    def _receive_some(self, link: Link, parts: list[memoryview], wanted: int) -> int:
        """How many bytes came, at least one; the deadline counts from the last byte that came before."""
        deadline = None
        while True:
            try:
                count = link.connection.recvmsg_into(parts)[0]
            except BlockingIOError:
                deadline = deadline or time.monotonic() + self._mesh.timeout
                if not self._wait(link, wanted):
                    self._mesh.check()  # a rank that left in good order may still have data on the way
                    if time.monotonic() > deadline:
                        raise self._mesh.stalled(link.rank, "waiting for data") from None
                continue
            except OSError:
                count = 0
            if not count:
                self._peer_is_gone(link)
            return count

    def _wait(self, source: Link | None, wanted: int) -> bool:
        """Send on what can be sent, else sleep until that, or until `wanted` bytes (or many) have come from `source`.
        False if POLL_S passed and nothing happened."""
        pending = [link for link in self._links.values() if link.unsent]
        moved = [push(link) for link in pending]
        if any(moved):
            return True
        poll = select.poll()
        for link in pending:
            if link.unsent:
                poll.register(link.connection, select.POLLOUT)
        if source:
            wakes_at = min(wanted, WAKE_BYTES)
            if wakes_at != source.wakes_at:
                source.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)
                source.wakes_at = wakes_at
            poll.register(source.connection, select.POLLIN | (select.POLLOUT if source.unsent else 0))
        return bool(poll.poll(POLL_S * 1000))

    def _peer_is_gone(self, link: Link) -> None:
        """The data connection closed: the mesh knows why, perhaps a moment later."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            self._mesh.check(link.rank, "waiting for data")
            poll_readable(self._mesh.sockets, POLL_S)
        raise ProtocolError(f"rank {link.rank} closed its data connection but stays in the group")


def checksum_of(connection: socket.socket, choice: str) -> Callable[[Array], int]:
    if choice == "off" or (choice == "auto" and on_loopback(connection)):
        return lambda array: 0  # noqa: ARG005
    from xxhash import xxh3_64_intdigest  # ten times as fast as zlib.crc32

    return lambda array: xxh3_64_intdigest(array.view(np.uint8).data) & 0xFFFFFFFF


def push(link: Link) -> bool:
    """Give the kernel as much as it takes at once; whether it took anything."""
    moved = False
    while link.unsent:
        try:
            sent = link.connection.sendmsg(list(islice(link.unsent, MOST_PARTS)))
        except BlockingIOError:
            return moved
        except OSError:  # the rank is gone: whoever waits for it says so
            link.unsent.clear()
            return True
        moved = True
        while link.unsent and sent >= len(link.unsent[0]):
            sent -= len(link.unsent.popleft())
        if sent:
            link.unsent[0] = link.unsent[0][sent:]
    return moved
