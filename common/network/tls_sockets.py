"""Sockets over TLS that are used as plain ones: they take and give many buffers in one call, and never wait.

Python's own wait in other words (SSLWantReadError), and take and give one buffer at a time. OpenSSL has three wishes,
which are met here: what it could not send has to be offered again from the same byte on; its bytes are read until it
has none left, as the kernel does not know of those it has read ahead; and two threads never use one connection at once.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from common.credentials.contexts import MemberSocket
from common.credentials.identity import MEMBER_NAME
from common.errors import ProtocolError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["TlsSocket", "is_encrypted", "pending_in", "secured"]

RECORD_BYTES = 16 * 1024  # the most that TLS has in one piece; shorter buffers are put together up to this
WRITE_BYTES = 8 * RECORD_BYTES  # that OpenSSL is given at once, and reports sent only as a whole
WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TlsSocket(MemberSocket):
    """Made by `secured`. The receiving methods fill what they are given, as far as data have come.

    Attributes:
        peer: who is at the other end, for errors.
    """

    peer = "the other end"
    lock = threading.Lock()  # of all until they are `secured`
    _stuck: memoryview | bytes = b""  # what was to be sent, and has to be offered to OpenSSL again
    _ahead = 0  # bytes that it has of what is offered here: more than that, where less is offered than the last time

    def sendmsg(self, buffers: Iterable[ReadableBuffer], *_: Any) -> int:  # type: ignore[override] # ssl's raises
        """How many bytes OpenSSL has taken.

        Raises:
            BlockingIOError: none.
        """
        parts = [memoryview(each).cast("B") for each in buffers]
        offered = sum(map(len, parts))
        with self.lock:
            while self._ahead < offered:
                self._stuck = self._stuck or chunk_of(parts, self._ahead)
                try:
                    self._ahead += super().send(self._stuck)
                except WAITS:
                    break
                self._stuck = b""
            taken = min(self._ahead, offered)
            self._ahead -= taken
        if offered and not taken:
            raise BlockingIOError
        return taken

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:  # noqa: ARG002 - of a socket
        return self.sendmsg([data])

    def recvmsg_into(  # type: ignore[override] # likewise
        self, buffers: Iterable[WriteableBuffer], *_: Any
    ) -> tuple[int, list[Any], int, Any]:
        """As of a socket.

        Raises:
            BlockingIOError: nothing has come.
            ProtocolError: what has come was damaged or forged.
        """
        got = 0
        with self.lock:
            for each in buffers:
                view = memoryview(each).cast("B")
                while view:
                    try:
                        count = super().recv_into(view)
                    except WAITS:
                        if got:
                            return got, [], 0, None
                        raise BlockingIOError from None
                    except ssl.SSLError as exc:
                        raise ProtocolError(f"data from {self.peer} were damaged or forged ({exc.reason})") from exc
                    if not count:
                        return got, [], 0, None
                    got += count
                    view = view[count:]
        return got, [], 0, None

    def recv_into(self, buffer: WriteableBuffer, nbytes: int | None = None, flags: int = 0) -> int:  # noqa: ARG002
        return self.recvmsg_into([memoryview(buffer).cast("B")[: nbytes or None]])[0]

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:  # noqa: ARG002
        data = bytearray(buflen)
        return bytes(data[: self.recvmsg_into([data])[0]])


def chunk_of(parts: list[memoryview], at: int) -> memoryview | bytes:
    """What to send next, of what lies from this byte on in these buffers; empty: nothing.

    >>> [bytes(chunk_of([memoryview(b"head"), memoryview(b"body")], at)) for at in (0, 5, 8)]
    [b'headbody', b'ody', b'']
    """
    short: list[memoryview] = []
    room = RECORD_BYTES
    for part in parts:
        if at >= len(part):
            at -= len(part)
            continue
        part, at = part[at:], 0
        if not short and len(part) >= RECORD_BYTES:
            return part[:WRITE_BYTES]
        short.append(part[:room])
        room -= len(short[-1])
        if not room:
            break
    return b"".join(short)


def secured(connection: socket.socket, context: ssl.SSLContext, *, server: bool) -> TlsSocket:
    """The same connection, over TLS, whose handshake is still to be made; `connection` itself is not to be used any
    longer. The context is changed to make sockets of this kind."""
    context.sslsocket_class = TlsSocket
    name = None if server else MEMBER_NAME
    made = context.wrap_socket(connection, server_side=server, server_hostname=name, do_handshake_on_connect=False)
    assert isinstance(made, TlsSocket)
    made.lock = threading.Lock()
    return made


def is_encrypted(connection: socket.socket) -> bool:
    """Then every byte is authenticated, too."""
    return isinstance(connection, TlsSocket)


def pending_in(connection: socket.socket) -> int:
    """Bytes that have come and been decrypted, of which the kernel knows nothing."""
    return connection.pending() if isinstance(connection, TlsSocket) else 0
