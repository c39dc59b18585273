"""The transport over TCP: a thread sends while the caller receives, so that both directions are full at once."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from contextlib import suppress

import numpy as np

from collective.mesh import Mesh, poll_readable
from collective.transport import SEGMENT_BYTES, Array, Tag, Transport
from common.errors import ProtocolError

__all__ = ["TcpTransport"]

FRAME = struct.Struct("<IIII")  # magic, payload bytes, checksum (0: none), reserved; the tag follows
MAGIC = 0x47535931  # "GSY1"
HEADER_BYTES = FRAME.size + Tag.FORMAT.size
POLL_S = 0.05
SLICE = struct.pack("ll", 0, int(POLL_S * 1e6))  # a struct timeval; a sleeping rank looks so often for the dead


class TcpTransport(Transport):
    """Ring over two sockets: one to the right neighbour, one from the left."""

    name = "tcp"

    def __init__(self, mesh: Mesh, nranks: int, to_right: socket.socket, from_left: socket.socket) -> None:
        self.rank, self.nranks, self.timeout = mesh.rank, nranks, mesh.timeout
        self._mesh = mesh
        self._to_right, self._from_left = to_right, from_left
        for connection in (to_right, from_left):  # blocking in the kernel, in slices; its buffers tune themselves
            connection.setblocking(True)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, SLICE)
        self._header = bytearray(HEADER_BYTES)
        self._payload = np.empty(SEGMENT_BYTES, np.uint8)
        self._todo: queue.SimpleQueue[tuple[bytes, Array] | threading.Event | None] = queue.SimpleQueue()
        self._ending = False
        self._sender = threading.Thread(target=self._send_all, name="gradsync-tcp-send", daemon=True)
        self._sender.start()

    def send(self, array: Array, tag: Tag) -> None:
        self._todo.put((FRAME.pack(MAGIC, array.nbytes, 0, 0) + tag.pack(), array))

    def receive(self, like: Array, tag: Tag) -> Array:
        out: Array = self._payload[: like.nbytes].view(like.dtype)
        self.receive_into(out, tag)
        return out

    def receive_into(self, out: Array, tag: Tag) -> None:
        self._fill(memoryview(self._header))
        magic, nbytes, _, _ = FRAME.unpack_from(self._header)
        if magic != MAGIC:
            raise ProtocolError(f"rank {self.left} sent something that is not a GradSync frame")
        tag.check(Tag.unpack(bytes(self._header[FRAME.size :])), self.left)
        if nbytes != out.nbytes:
            raise ProtocolError(f"rank {self.left} sent {nbytes} bytes for {tag}, expected {out.nbytes}")
        self._fill(memoryview(out.view(np.uint8).data))

    def flush(self) -> None:
        done = threading.Event()
        self._todo.put(done)
        self._wait_for(done)

    def close(self, reason: str = "") -> None:
        if self._ending:
            return
        self._ending = bool(reason)  # after a failure unsent data is of no use
        self._todo.put(None)
        self._sender.join(self.timeout)
        self._ending = True
        self._mesh.close(reason)
        self._to_right.close()
        self._from_left.close()

    def _wait_for(self, done: threading.Event) -> None:
        deadline = time.monotonic() + self.timeout
        while not done.wait(POLL_S):
            had_left = self._mesh.has_left(self.right)
            self._mesh.check(self.right if had_left and not done.is_set() else None, "sending")
            if time.monotonic() > deadline:
                raise self._mesh.stalled(self.right, "sending")

    def _fill(self, view: memoryview) -> None:
        """Receive exactly len(view) bytes; the deadline counts from the last byte that came."""
        filled, deadline = 0, None
        while filled < len(view):
            try:
                count = self._from_left.recv_into(view[filled:], 0, socket.MSG_WAITALL)
            except BlockingIOError:  # a slice has passed and nothing came
                self._mesh.check()  # a neighbour that left in good order may still have data on the way
                deadline = deadline or time.monotonic() + self.timeout
                if time.monotonic() > deadline:
                    raise self._mesh.stalled(self.left, "waiting for data") from None
                continue
            except OSError:
                count = 0
            if not count:
                self._left_is_gone()
            filled, deadline = filled + count, None

    def _left_is_gone(self) -> None:
        """The data socket closed: the mesh knows why, perhaps a moment later."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            self._mesh.check(self.left, "waiting for data")
            poll_readable(self._mesh.sockets, POLL_S)
        raise ProtocolError(f"rank {self.left} closed its data connection but stays in the group")

    def _send_all(self) -> None:
        while (item := self._todo.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif not self._ending:
                header, array = item
                with suppress(OSError):  # the neighbour is gone: whoever waits for it says so
                    self._send_frame([memoryview(header), memoryview(array.view(np.uint8).data)])

    def _send_frame(self, parts: list[memoryview]) -> None:
        while parts and not self._ending:
            try:
                sent = self._to_right.sendmsg(parts)
            except BlockingIOError:  # a slice has passed
                continue
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
