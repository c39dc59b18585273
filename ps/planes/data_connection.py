"""One end of a data connection: its thread sends what was put and takes what comes, both at once."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
from google.protobuf.message import DecodeError

from common.errors import ChunkCorrupt, GradSyncError, ProtocolError
from common.network.gradsync_pb2 import ServerMessage, TrainerMessage
from common.network.links import MAGIC, Link
from common.network.rpc import CHUNK_BYTES
from common.network.sockets import on_loopback
from ps.planes.wire_format import TAG_BYTES, Outgoing, tagged

__all__ = ["NEAR_BYTES", "DataConnection", "Receiver"]

FAR_BYTES = CHUNK_BYTES // 2  # of words in a message between hosts: what all have sent is answered while the rest comes
NEAR_BYTES = 4 * CHUNK_BYTES  # on one host, where a message costs as much as copying 0.3 MB
HELD_S = 0.1
AHEAD = 16  # parts of messages that are made before the kernel takes them
Message = Outgoing | TrainerMessage | ServerMessage


class Receiver(Protocol):
    """What is done with that which comes; called on the connection's thread."""

    def place(self, tag: bytes, nbytes: int) -> memoryview | None:
        """Where a payload is to be written, of `nbytes`; None: it is not wanted yet. This is asked again when the
        connection is woken, and every HELD_S.

        Raises:
            GradSyncError, DecodeError: it cannot be meant.
        """

    def take(self) -> None:
        """The payload is where it was to be written."""

    def ended(self, error: Exception | None) -> None:
        """Nothing more comes: the other end has hung up, or there was an error; not called after `close`."""


class DataConnection:
    """To be begun, and closed.

    Args:
        peer: the other end's name, for errors.

    Attributes:
        most: bytes of words that a message is to have.
    """

    _receiver: Receiver

    def __init__(self, connection: socket.socket, *, peer: str) -> None:
        self.most = NEAR_BYTES if on_loopback(connection) else FAR_BYTES
        self._link, self._peer = Link(connection, TAG_BYTES), peer
        self._waiting: deque[Iterator[Message]] = deque()  # put, and not begun
        self._begun: Iterator[Message] = iter(())
        self._sending = threading.Lock()  # held by whoever sends
        self._payload: memoryview | None = None  # of what is being received
        self._checksum, self._tag = 0, b""  # its checksum and tag
        self._got = 0  # bytes of it, or of the header if there is no payload yet
        self._drawn = True  # everything that was put has been made into parts
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._asleep, self._woken, self._closing = False, False, False
        self._until = 0.0  # when it is closed: seconds of the clock until which what was put is still sent
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="gradsync-data", daemon=True)

    def begin(self, receiver: Receiver) -> None:
        """From now on what comes is given to the receiver."""
        self._receiver = receiver
        self._thread.start()

    def put(self, messages: Iterable[Message], *, at_once: bool = False) -> None:
        """Send these after all that was put before; words are read when they are sent. Does not block.

        Args:
            at_once: they are few and short: they are sent here rather than on the connection's thread, if they can be.
        """
        self._waiting.append(iter(messages))
        if at_once and self._sending.acquire(blocking=False):
            try:
                self._send()
                left = self._link.unsent or not self._drawn
            finally:
                self._sending.release()
            if not left:
                return
        self.wake()

    def wake(self) -> None:
        """What was not wanted may be now, or there is something to be sent."""
        self._woken = True
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._bell, 1)

    def hang_up(self) -> None:
        """In a forked child, which has no part in it."""
        self._link.connection.close()

    def close(self, until: float = 0.0) -> None:
        """Idempotent.

        Args:
            until: what was put is still sent, until then at most; monotonic, in seconds.
        """
        if self._closing:
            return
        self._until, self._closing = until, True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        self._link.connection.close()
        os.close(self._bell)

    def _run(self) -> None:
        error: Exception | None = None
        try:
            while not self._over():
                self._woken = False
                with self._sending:
                    moved = self._send()
                if not (self._receive() or moved):
                    self._sleep()
        except EOFError:
            pass
        except DecodeError as exc:
            error = ProtocolError(f"{self._peer} sent a message that cannot be decoded ({exc})")
        except Exception as exc:
            error = exc
        if not self._closing:
            self._receiver.ended(error)
            if error and not isinstance(error, GradSyncError):
                raise error

    def _over(self) -> bool:
        """Whether it has been closed, and sends nothing any more."""
        if not self._closing:
            return False
        left = self._waiting or not self._drawn or self._link.unsent
        return not left or time.monotonic() > self._until

    def _send(self) -> bool:
        """Once; whether anything was."""
        unsent, self._drawn = self._link.unsent, False
        while len(unsent) < AHEAD and not self._drawn:
            if (message := next(self._begun, None)) is not None:
                self._link.put(*tagged(message))
            elif self._waiting:
                self._begun = self._waiting.popleft()
            else:
                self._drawn = True
        return bool(unsent) and self._link.push_some()

    def _receive(self) -> bool:
        """Once; whether anything has come, or is wanted by now."""
        link = self._link
        if self._got == link.header_bytes and self._payload is None and not self._begin():
            return False
        header, parts = memoryview(link.header), []
        if self._payload is None:
            parts.append(header[self._got :])
        else:
            parts += [self._payload[self._got :], header]  # and the header of what follows
        try:
            count = link.receive(parts)
        except BlockingIOError:
            return False
        if not count:
            raise EOFError
        self._got += count
        if self._payload is not None:
            if self._got < len(self._payload):
                return True
            self._got -= len(self._payload)
            self._end(self._payload)
        if self._got == link.header_bytes:
            self._begin()
        return True

    def _begin(self) -> bool:
        """A header has come: find the place for its payload; False if it is not wanted yet."""
        magic, nbytes, checksum = self._link.frame
        if magic != MAGIC:
            raise ProtocolError(f"{self._peer} sent something that is not a GradSync frame")
        place = self._receiver.place(self._link.tag, nbytes)
        if place is None:
            return False
        self._checksum, self._tag, self._payload, self._got = checksum, self._link.tag, place, 0
        if not nbytes:
            self._end(place)
        return True

    def _end(self, payload: memoryview) -> None:
        found = self._link.checksum(np.frombuffer(payload, np.uint8), self._tag) if self._checksum else 0
        if found and found != self._checksum:
            raise ChunkCorrupt(
                f"data from {self._peer} were damaged on their way: checksum {found:08x}, sent with "
                f"{self._checksum:08x}; look for a faulty network card or memory"
            )
        self._payload = None
        self._receiver.take()

    def _sleep(self) -> None:
        """Until something comes that is wanted, or can be sent, or `wake` is called."""
        link, events = self._link, 0
        if self._payload is not None:
            link.wake_for(len(self._payload) - self._got)
            events = select.POLLIN
        elif self._got < link.header_bytes:
            link.wake_for(link.header_bytes - self._got)
            events = select.POLLIN
        held = not events
        if link.unsent:
            events |= select.POLLOUT
        self._poll.register(link.connection, events)
        limit = HELD_S if held else None
        self._asleep = True
        if self._closing:
            limit = max(0.0, self._until - time.monotonic())
        if not self._woken:
            for descriptor, event in self._poll.poll(None if limit is None else limit * 1000):
                if descriptor == self._bell:
                    os.eventfd_read(self._bell)
                elif not event & events:  # reset, while nothing was wanted
                    raise EOFError
        self._asleep = False
