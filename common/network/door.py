"""Where members of a job open connections with this process: who proves to have a seat is let in, once for each seat.

A thread of its own shakes all hands (common/network/proofs.py says how), so that a stranger holds nobody up, whatever
he sends or does not send: he has HANDSHAKE_S, a socket and a few kilobytes; of MOST_CALLERS strangers one makes room
for the next.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from common.credentials.credentials import Credentials
from common.network.proofs import ANSWER, GREETING, HANDSHAKE_S, MARK, NONCE_BYTES, Nonces, encrypts, ports_of
from common.network.refusal_log import Refusals
from common.network.sockets import tuned
from common.network.tls_sockets import TlsSocket, secured
from common.system.addresses import address_of
from common.system.handover import check_user
from common.system.memory import Unreachable

__all__ = ["Door", "listening"]

BACKLOG = 512
MOST_CALLERS = 256  # that have not shown yet whose they are
NOBODYS_KEY = bytes(32)
NO_PROOF = "it did not prove that it belongs to this job"
SILENT = f"it had not proven within {HANDSHAKE_S:g} s that it belongs to this job"
CROWDED_OUT = "it said nothing, and others came"


@dataclass(eq=False)
class Caller:
    """A connection that has not shown yet whose it is."""

    descriptor: int
    connection: socket.socket
    home: str  # its host
    deadline: float
    nonce: bytes  # that it was greeted with; empty: it was not yet, as TLS has to be agreed on first
    said: bytes = b""

    @property
    def has_answered(self) -> bool:
        return len(self.said) == ANSWER.size


class Door:
    """A context manager.

    Args:
        listeners: sockets that listen; closed with the door.
        credentials: of this process.

    Attributes:
        tell: called by the door's thread when somebody has been let in.
    """

    def __init__(self, listeners: Sequence[socket.socket], credentials: Credentials) -> None:
        self.tell: Callable[[], object] = lambda: None
        self._listeners, self._credentials = listeners, credentials
        self._keys: dict[int, bytes] | None = None  # by seat; who comes takes it out. None: not known yet
        self._let_in: dict[int, socket.socket] = {}  # by seat, until they are taken
        self._callers: dict[int, Caller] = {}  # by descriptor, the oldest first
        self._refusals = Refusals(
            next(filter(None, map(name_of, listeners)), "a socket between processes of this user")
        )
        self._closing, self._bell = False, os.eventfd(0)
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        for each in listeners:
            self._selector.register(each, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="gradsync-door", daemon=True)
        self._thread.start()

    def admit(self, keys: Mapping[int, bytes]) -> None:
        """Let in who proves to know the key of one of these seats; who has called before the first ones were known has
        been waiting."""
        with self._changed:
            self._keys = {**(self._keys or {}), **keys}
            if not self._closing:
                os.eventfd_write(self._bell, 1)

    def take(self, seat: int) -> socket.socket | None:
        """The connection that was opened for this seat, once; None: none was yet."""
        with self._changed:
            return self._let_in.pop(seat, None)

    def take_all(self, seats: Container[int]) -> list[tuple[int, socket.socket]]:
        """All that were opened for these seats and not taken yet, each with its seat."""
        if not self._let_in:
            return []
        with self._changed:
            return [(seat, self._let_in.pop(seat)) for seat in [*self._let_in] if seat in seats]

    def wait(self, seats: Collection[int], deadline: float) -> bool:
        """Until one of these seats can be taken; False if none could before `deadline` (monotonic seconds)."""
        with self._changed:
            return self._changed.wait_for(
                lambda: any(seat in self._let_in for seat in seats), max(0.0, deadline - time.monotonic())
            )

    def remove(self, seat: int) -> None:
        """Nobody is let in there any longer."""
        with self._changed:
            (self._keys or {}).pop(seat, None)
        if connection := self.take(seat):
            connection.close()

    def close(self) -> None:
        """Nobody is let in any longer; idempotent."""
        if self._closing:
            return
        with self._changed:
            self._closing = True
            os.eventfd_write(self._bell, 1)
        self._thread.join()
        self._selector.close()
        for connection in (*self._listeners, *(c.connection for c in self._callers.values()), *self._let_in.values()):
            connection.close()
        self._refusals.close()
        os.close(self._bell)

    def forget(self) -> None:
        """In a forked child, which has no such thread: this process's listeners are the parent's alone."""
        self._closing = True
        for each in (*self._listeners, *self._let_in.values()):
            each.close()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while not self._closing:
            first = min((c.deadline for c in self._callers.values() if not c.has_answered), default=None)
            for key, _ in self._selector.select(None if first is None else max(0.0, first - time.monotonic())):
                if key.fd == self._bell:
                    os.eventfd_read(self._bell)
                    for waiting in [each for each in self._callers.values() if each.has_answered]:
                        self._attend(waiting)
                elif caller := self._callers.get(key.fd):
                    self._attend(caller)
                elif isinstance(key.fileobj, socket.socket):
                    self._accept(key.fileobj)
            now = time.monotonic()
            for late in [c for c in self._callers.values() if c.deadline <= now and not c.has_answered]:
                self._turn_away(late, SILENT)

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return self._credentials.server_context()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it has gone, or there are too many open files: those who are there go on
            time.sleep(0.01)
            return
        try:
            connection.setblocking(False)
            unix = connection.family == socket.AF_UNIX
            if unix:
                check_user(connection)
            home = "" if unix else connection.getpeername()[0]
            caller = Caller(connection.fileno(), connection, home, time.monotonic() + HANDSHAKE_S, b"")
            if not encrypts(connection, self._credentials):
                self._greet(caller)
        except Unreachable as exc:
            self._refusals.note("", str(exc))
            connection.close()
            return
        except OSError:
            connection.close()
            return
        if len(self._callers) >= MOST_CALLERS:
            self._make_room()
        self._callers[caller.descriptor] = caller
        self._selector.register(caller.descriptor, selectors.EVENT_READ)

    def _make_room(self) -> None:
        """Whoever has been silent for longest of the host with most callers has to go."""
        crowd, _ = Counter(caller.home for caller in self._callers.values()).most_common(1)[0]
        self._turn_away(next(caller for caller in self._callers.values() if caller.home == crowd), CROWDED_OUT)

    def _greet(self, caller: Caller) -> None:
        """
        Raises:
            OSError: it has gone.
        """
        caller.nonce = secrets.token_bytes(NONCE_BYTES)
        caller.connection.send(GREETING.pack(MARK, caller.nonce))

    def _attend(self, caller: Caller) -> None:
        """A caller has said something, or the keys are known by which to judge it."""
        try:
            if not caller.has_answered:
                self._hear(caller)
            self._judge(caller)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except Exception:  # OpenSSL's too: whatever a stranger does ends his connection only
            self._turn_away(caller, NO_PROOF)

    def _hear(self, caller: Caller) -> None:
        """Until its answer is whole. For TLS nothing is kept before its first byte has come.

        Raises:
            BlockingIOError, ssl.SSLWantReadError: there is more to come.
            OSError: it has gone, or is no member.
        """
        if not caller.nonce:
            if not isinstance(caller.connection, TlsSocket):
                caller.connection = secured(caller.connection, self._context, server=True)
            caller.connection.do_handshake()
            self._greet(caller)
        while not caller.has_answered:
            more = caller.connection.recv(ANSWER.size - len(caller.said))
            if not more:
                raise ConnectionError
            caller.said += more
        self._selector.unregister(caller.descriptor)

    def _judge(self, caller: Caller) -> None:
        """Let in whose answer is right, once the keys are known.

        Raises:
            OSError: it has gone.
        """
        seat, nonce, shown = ANSWER.unpack(caller.said)
        nonces = Nonces(caller.nonce, nonce, ports_of(caller.connection, caller=False))
        with self._changed:  # until it has been told: who takes the connection may write at once
            if self._keys is None:
                return
            key = self._keys.get(seat)
            right = hmac.compare_digest(shown, nonces.proof(key or NOBODYS_KEY, b"caller", seat))
            if key is None or not right:
                self._turn_away(caller, NO_PROOF)
                return
            caller.connection.send(nonces.proof(key, b"listener", seat))
            tuned(caller.connection)
            del self._callers[caller.descriptor], self._keys[seat]
            self._let_in[seat] = caller.connection
            self._changed.notify_all()
        self.tell()

    def _turn_away(self, caller: Caller, why: str) -> None:
        self._refusals.note(caller.home, why)
        if self._callers.pop(caller.descriptor, None):
            with suppress(KeyError):  # as it has answered
                self._selector.unregister(caller.descriptor)
        caller.connection.close()


def name_of(listener: socket.socket) -> str:
    """Of a TCP socket: its address; "" for a Unix one."""
    return "" if listener.family == socket.AF_UNIX else address_of(*listener.getsockname()[:2])


def listening(family: int, where: str | tuple[Any, ...], *, again: bool = False) -> socket.socket:
    """A socket for a door.

    Args:
        again: also where connections of an earlier listener are still being closed.

    Raises:
        OSError: it cannot be.
    """
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if again:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
