"""What ranks tell each other beside the data: small JSON objects, length first, on a socket of every two ranks.

These are the messages:

    {"leave": reason}                    I am going: training is complete (reason ""), or I failed
    {"leave": reason, "because": [kind, text, rank]}   ... because of another rank, with the error that says so
    {"waiting?": 1} / {"waiting!": s}    give a sign of life / here: I have waited for s seconds (0: I do not wait)
    {"say": line}                        write this to your stderr
    {"note": [numbers]}                  what the algorithm above has to say to this rank
    {"segment": id, "nbytes": n}         a segment of my memory; its descriptor comes with the message (Unix sockets)
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from common.errors import GradSyncError, LayoutMismatch, PeerLost, error_from_name
from common.system.handover import receive

__all__ = ["Peer"]

LENGTH = struct.Struct("<I")
READ_BYTES = 65_536


class Peer:
    """The socket to another rank, and what it has said; nothing here waits for it to say something.

    Args:
        waits: tells for how many seconds this rank has waited; 0: it does not.

    Attributes:
        left: it said that its training is complete, or it is gone.
        failure: the first reason for which the group cannot go on that was heard from it, and the rank at fault.
        heard_at: when anything was heard last, monotonic seconds.
        waited: for how many seconds, as it said last.
    """

    def __init__(self, rank: int, connection: socket.socket, waits: Callable[[], float]) -> None:
        self.rank, self.connection, self._waits = rank, connection, waits
        self.left = False
        self.heard_at, self.waited = 0.0, 0.0
        self.failure: tuple[GradSyncError, int] | None = None
        self.notes: deque[list[int]] = deque()  # received, not yet taken
        self.segments: dict[int, tuple[int, int]] = {}  # number -> (descriptor, bytes), likewise
        self._descriptors: deque[int] = deque()  # of messages that are to come
        self._unread = bytearray()
        connection.setblocking(False)

    def send(self, message: dict[str, Any], *, timeout: float, descriptors: Sequence[int] = ()) -> None:
        """Blocks at most `timeout` seconds, while the socket is full. Never raises: reading says who is gone."""
        data = json.dumps(message).encode()
        framed = LENGTH.pack(len(data)) + data
        with suppress(OSError):
            sent = 0
            with suppress(BlockingIOError):
                sent = self.connection.send(framed) if not descriptors else 0
            if sent == len(framed):
                return
            self.connection.settimeout(timeout)
            if descriptors:
                sent = socket.send_fds(self.connection, [framed], descriptors)
            self.connection.sendall(framed[sent:])
        with suppress(OSError):
            self.connection.setblocking(False)

    def read(self, *, timeout: float) -> None:
        """Take in what has arrived, and answer it (see `send` for the timeout)."""
        try:
            if self.connection.family == socket.AF_UNIX:
                data, descriptors = receive(self.connection, READ_BYTES, 16)
                self._descriptors.extend(descriptors)
            else:
                data = self.connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._unread += data
        self.heard_at = time.monotonic()
        while len(self._unread) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._unread)
            if len(self._unread) < LENGTH.size + size:
                break
            message = json.loads(self._unread[LENGTH.size : LENGTH.size + size])
            del self._unread[: LENGTH.size + size]
            self._take(message, timeout)
        if not data and not self.left:
            self._fail(PeerLost(f"rank {self.rank} died: its connection closed without a goodbye"), self.rank)
            self.left = True

    def close(self) -> None:
        """Give back the socket and the descriptors that nobody took."""
        self.connection.close()
        for descriptor in [*self._descriptors, *(d for d, _ in self.segments.values())]:
            os.close(descriptor)

    def _take(self, message: dict[str, Any], timeout: float) -> None:
        if "note" in message:
            self.notes.append(message["note"])
        elif "segment" in message:
            self.segments[message["segment"]] = (self._descriptors.popleft(), message["nbytes"])
        elif "waiting?" in message:
            self.send({"waiting!": self._waits()}, timeout=timeout)
        elif "waiting!" in message:
            self.waited = message["waiting!"]
        elif "say" in message:
            print(message["say"], file=sys.stderr, flush=True)
        elif "leave" in message:
            self.left = True
            if "because" in message:
                kind, text, culprit = message["because"]
                self._fail(error_from_name(kind, text), culprit)
            elif message["leave"]:
                kind, _, text = message["leave"].partition(": ")
                error = PeerLost(f"rank {self.rank} left with {message['leave']}")
                self._fail(LayoutMismatch(text) if kind == LayoutMismatch.__name__ else error, self.rank)

    def _fail(self, error: GradSyncError, culprit: int) -> None:
        self.failure = self.failure or (error, culprit)
