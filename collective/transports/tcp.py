"""The transport over TCP: framed messages (common/network/links.py), sent and received side by side by the calling
thread alone. Whoever waits in `receive` or `flush` sends on meanwhile what the kernel did not take at once. Messages
have the tag of collective/call_tags.py.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Mapping

import numpy as np

from collective.call_tags import FORMAT, Array, Tag
from collective.membership.liveness import Mesh
from collective.transports.base import Transport
from common.errors import ChunkCorrupt, ProtocolError
from common.network.links import MAGIC, Link
from common.network.reach import is_cut_off
from common.network.sockets import poll_readable
from common.system.fault_points import fault_here, reach

__all__ = ["TcpTransport"]

LOOKS = 8  # for what a rank has sent before this one sleeps, giving the core away in between: some 20 us
POLL_S = 0.05  # a sleeping rank looks so often for the dead


class TcpTransport(Transport):
    """Over one data connection to each rank that this one talks to.

    Args:
        checksum: one of CHECKSUMS, see Link. Equal on all ranks.
    """

    piece_bytes = 512 * 1024

    def __init__(self, mesh: Mesh, connections: Mapping[int, socket.socket], *, checksum: str = "auto") -> None:
        self.rank, self.nranks = mesh.rank, mesh.nranks
        self._mesh = mesh
        self._faulty = fault_here() is not None  # in this epoch
        self._links = {
            rank: Link(connection, FORMAT.size, checksum=checksum) for rank, connection in connections.items()
        }

    def send(self, rank: int, array: Array, tag: Tag) -> None:
        link = self._links[rank]
        if self._faulty:
            reach("sending", tag.step)
        link.put(array, tag.pack())
        link.push()
        if self._faulty:
            reach("sent", tag.step)

    def receive(self, rank: int, out: Array, tag: Tag) -> None:
        link = self._links[rank]
        header, payload = memoryview(link.header), memoryview(out.view(np.uint8).data)
        got = 0
        while got < link.header_bytes:
            got += self._receive_some(rank, [header[got:], payload], link.header_bytes - got + len(payload))
        packed = tag.pack()
        sent = self._check(rank, out, tag, packed)
        if self._faulty:
            reach("receiving", tag.step)
        got -= link.header_bytes
        while got < len(payload):
            got += self._receive_some(rank, [payload[got:]], len(payload) - got)
        if (found := link.checksum(out, packed)) != sent:
            raise ChunkCorrupt(
                f"data from rank {rank} was damaged on its way to rank {self._mesh.rank} at step {tag.step}, bucket "
                f"{tag.bucket}: checksum {found:08x}, sent with {sent:08x}; look for a faulty network card or memory"
            )

    def flush(self) -> None:
        for rank, link in self._links.items():
            since = time.monotonic()
            while link.unsent:
                if link.push() or self._wait(None, 0):
                    since = time.monotonic()
                else:
                    self._mesh.check(rank if self._mesh.has_left(rank) else None, "sending")
                    self._mesh.wait_on(rank, "sending", since)
        self._mesh.stop_waiting()

    def close(self, reason: str = "") -> None:
        """As Transport says; what was sent before a good end still arrives."""
        self._mesh.close(reason)
        for link in self._links.values():
            link.connection.close()

    def _check(self, rank: int, out: Array, tag: Tag, packed: bytes) -> int:
        """Whether the header that has come from a rank is of the message that is expected; its checksum."""
        link = self._links[rank]
        magic, nbytes, checksum = link.frame
        if magic != MAGIC:
            raise ProtocolError(f"rank {rank} sent something that is not a GradSync frame")
        if link.tag != packed:
            tag.check(Tag.unpack(link.tag), rank)
        tag.check_size(nbytes, out.nbytes, rank)
        return checksum

    def _receive_some(self, rank: int, parts: list[memoryview], wanted: int) -> int:
        """How many bytes came, at least one; how long it waits counts from the last byte that came before."""
        link, since, looks = self._links[rank], 0.0, LOOKS
        while True:
            try:
                count = link.receive(parts)
            except BlockingIOError:
                if looks and not link.unsent:
                    looks -= 1
                    os.sched_yield()
                    continue
                since = since or time.monotonic()
                if not self._wait(link, wanted):
                    self._mesh.check()  # a rank that left in good order may still have data on the way
                    self._mesh.wait_on(rank, "waiting for data", since)
                continue
            if not count:
                self._peer_is_gone(rank, since)
            if since:
                self._mesh.stop_waiting()
            return count

    def _wait(self, source: Link | None, wanted: int) -> bool:
        """Send on what can be sent, else sleep until that, or until `wanted` bytes (or many) have come from `source`.
        False if POLL_S passed and nothing happened."""
        pending = [link for link in self._links.values() if link.unsent]
        moved = [link.push() for link in pending]
        if any(moved):
            return True
        poll = select.poll()
        for link in pending:
            if link.unsent:
                poll.register(link.connection, select.POLLOUT)
        if source:
            source.wake_for(wanted)
            poll.register(source.connection, select.POLLIN | (select.POLLOUT if source.unsent else 0))
        return bool(poll.poll(POLL_S * 1000))

    def _peer_is_gone(self, rank: int, since: float) -> None:
        """The data connection closed: the mesh knows why, perhaps a moment later.

        Over a link that carries nothing to that rank it never knows: TCP holds a goodbye back until what was sent
        before it is acknowledged. That is told as a cut link once this rank has waited for --timeout, too.
        """
        peer, since = self._mesh.peers.get(rank), since or time.monotonic()
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline or (peer and peer.host and is_cut_off(peer.host)):
            self._mesh.check(rank, "waiting for data")
            self._mesh.wait_on(rank, "waiting for data", since)
            poll_readable(self._mesh.sockets, POLL_S)
        raise ProtocolError(f"rank {rank} closed its data connection but stays in the group")
