"""Strangers at a port: who says nothing, who says something else, and who stops in the middle of a handshake."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from common.network.proofs import ANSWER

__all__ = ["Crowd"]

HELLO_OF_TLS = bytes.fromhex("1603010200010001fc0303") + bytes(32)  # as it begins
SAYINGS = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n" * 9,
    HELLO_OF_TLS,
    b"\0",
    bytes(ANSWER.size - 1),
    bytes(ANSWER.size),
    b"\xff" * 9999,
)


class Crowd:
    """A context manager: so many strangers at each of these ports of this host, until it ends."""

    def __init__(self, ports: Sequence[int], count: int) -> None:
        self._opened: list[socket.socket] = []
        for number in range(count):
            for port in ports:
                with suppress(OSError):
                    self._come(port, SAYINGS[number % len(SAYINGS)] if number % 4 == 0 else b"")

    def _come(self, port: int, says: bytes) -> None:
        stranger = socket.create_connection(("127.0.0.1", port), 5.0)
        self._opened.append(stranger)
        stranger.setblocking(False)
        stranger.send(says)

    def close(self) -> None:
        for each in self._opened:
            each.close()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
