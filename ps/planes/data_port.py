"""Where trainers open their data connections with a server, and how each shows that it has a seat.

    server    MARK, nonce                                          20 bytes
    trainer   seat (u32), proof of "trainer", the seat, the nonce  36 bytes
    server    proof of "server", the seat, the nonce               32 bytes

Every rank has a seat for each model: model x nranks + rank. A proof is an HMAC-SHA256 by the token that the rank was
given when it joined for the model, and the secret of the job's launcher, if it has one. So neither is told, what was
overheard cannot be used again, and the trainer knows whom it has reached.
Whoever says anything else, or nothing for HELLO_S, is dropped, which ends nothing.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from common.errors import PeerUnreachable, PortInUse
from common.network.sockets import tuned
from common.system.addresses import address_of

__all__ = ["HELLO_S", "DataPort", "Seats", "call"]

MARK = b"GSD1"
GREETING = struct.Struct("<4s16s")  # mark, nonce
ANSWER = struct.Struct("<I32s")  # seat, proof
PROOF_BYTES = 32
HELLO_S = 5.0  # how long either end waits for the other's part
BACKLOG = 128
MOST_CALLERS = 1024  # that have not said who they are; whoever has been silent for longest makes room


def proof(key: bytes, who: bytes, seat: int, nonce: bytes) -> bytes:
    return hmac.digest(key, b"%s %d %s" % (who, seat, nonce), "sha256")


def call(host: str, port: int, rank: int, key: bytes, seconds: float, *, seat: int | None = None) -> socket.socket:
    """Open a trainer's data connection with the server that has its port there.

    Args:
        key: the token that came with the seat, and the job's secret.
        seconds: how long it may take.
        seat: if it is not the rank's number.

    Raises:
        PeerUnreachable: why it cannot be had, in words.
    """
    deadline, seat = time.monotonic() + seconds, rank if seat is None else seat
    where = f"its data port {address_of(host, port)}"
    try:
        connection = socket.create_connection((host, port), seconds)
    except OSError as exc:
        raise PeerUnreachable(f"{where} was not reached within {seconds:g} s ({exc.strerror or exc})") from exc
    try:
        mark, nonce = GREETING.unpack(receive(connection, GREETING.size, deadline))
        if mark == MARK:
            connection.sendall(ANSWER.pack(seat, proof(key, b"trainer", seat, nonce)))
            if hmac.compare_digest(receive(connection, PROOF_BYTES, deadline), proof(key, b"server", seat, nonce)):
                return tuned(connection)
        why = "somebody else answers there"
    except OSError as exc:
        why = str(exc.strerror or exc)
    connection.close()
    raise PeerUnreachable(f"{where} did not let rank {rank} in ({why})")


def receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """So many bytes.

    Raises:
        OSError: they did not come.
    """
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return data


def listen(host: str, port: int) -> socket.socket:
    """
    Raises:
        OSError: it cannot be.
    """
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


@dataclass
class Caller:
    """A connection that has not shown yet whose it is."""

    nonce: bytes
    deadline: float
    said: bytes = b""


class DataPort:
    """Lets in, on a thread of its own, who has a seat, once each; a context manager.

    Args:
        host: an address or name of this machine.
        port: 0: the system chooses.
        keys: of the seats from 0 on, as of `call`; further ones come with `more`.

    Raises:
        PortInUse: at construction.
    """

    def __init__(self, host: str, port: int, keys: Sequence[bytes] = ()) -> None:
        self._keys = dict(enumerate(keys))  # by seat; who comes takes it out
        self._seats: dict[int, socket.socket] = {}  # of those who were let in, until they are taken
        self._callers: dict[socket.socket, Caller] = {}
        try:
            self._listener = listen(host, port)
        except OSError as exc:
            raise PortInUse(
                f"cannot listen on data port {address_of(host, port)}: the port is in use or the address not ours; "
                "choose another --data-port"
            ) from exc
        self.port: int = self._listener.getsockname()[1]
        self._closing, self._bell = False, os.eventfd(0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="gradsync-data-port", daemon=True)
        self._thread.start()

    def more(self, first: int, keys: Sequence[bytes]) -> Seats:
        """Further seats, from number `first` on."""
        self._keys.update(enumerate(keys, first))
        return Seats(self, first, len(keys))

    def take(self, seat: int) -> socket.socket | None:
        """The connection that the seat's rank has opened, once; None: it has none."""
        return self._seats.pop(seat, None)

    def remove(self, seat: int) -> None:
        """Nobody is let in there any longer."""
        self._keys.pop(seat, None)
        if connection := self.take(seat):
            connection.close()

    def close(self) -> None:
        """Nobody is let in any longer; idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        self._selector.close()
        for connection in (self._listener, *self._callers, *self._seats.values()):
            connection.close()
        os.close(self._bell)

    def __enter__(self) -> DataPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while not self._closing:
            first = min((caller.deadline for caller in self._callers.values()), default=None)
            for key, _ in self._selector.select(None if first is None else max(0.0, first - time.monotonic())):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)
            now = time.monotonic()
            for connection in [each for each, caller in self._callers.items() if caller.deadline <= now]:
                self._drop(connection)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone, or there are too many open files: those who are there go on
            time.sleep(0.01)
            return
        connection.setblocking(False)
        caller = Caller(secrets.token_bytes(16), time.monotonic() + HELLO_S)
        try:
            connection.send(GREETING.pack(MARK, caller.nonce))
        except OSError:
            connection.close()
            return
        if len(self._callers) == MOST_CALLERS:
            self._drop(next(iter(self._callers)))
        self._callers[connection] = caller
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        caller = self._callers[connection]
        try:
            more = connection.recv(ANSWER.size - len(caller.said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        caller.said += more
        if not more:
            self._drop(connection)
        elif len(caller.said) == ANSWER.size:
            self._let_in(connection, caller)

    def _let_in(self, connection: socket.socket, caller: Caller) -> None:
        """If its answer is right. What follows it is the session's, so no more than it was read."""
        seat, shown = ANSWER.unpack(caller.said)
        key = self._keys.get(seat)
        right = hmac.compare_digest(shown, proof(key or bytes(16), b"trainer", seat, caller.nonce))
        if key is None or not right:
            self._drop(connection)
        else:
            self._forget(connection)
            self._keys.pop(seat, None)
            with suppress(OSError):  # it has gone: whoever reads from it will see
                tuned(connection)
            self._seats[seat] = connection
            with suppress(OSError):
                connection.send(proof(key, b"server", seat, caller.nonce))

    def _forget(self, connection: socket.socket) -> None:
        del self._callers[connection]
        self._selector.unregister(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()


class Seats:
    """Those of one model's trainers at a data port."""

    def __init__(self, port: DataPort, first: int, count: int) -> None:
        self.port = port.port
        self._at, self._first, self._count = port, first, count

    def take(self, rank: int) -> socket.socket | None:
        """The connection that a rank has opened, once; None: it has none."""
        return self._at.take(self._first + rank)

    def close(self) -> None:
        """Nobody is let in any longer; idempotent."""
        for seat in range(self._first, self._first + self._count):
            self._at.remove(seat)
