"""What strangers say at a door, and what one who listens in a member's place says to who calls."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import SimpleNamespace

import pytest

from common.errors import PeerUnreachable
from common.network import door as doors
from common.network import proofs
from common.network.door import Door, listening
from common.network.proofs import ANSWER, GREETING, MARK, NONCE_BYTES, PROOF_BYTES, Nonces, prove
from tests.fuzz.target import Target
from tests.support.credentials import with_secret

__all__ = ["TARGETS"]

SEAT, KEY = 3, b"a seat's key"
NONCE = bytes(range(NONCE_BYTES))
OURS = with_secret(1)
DEADLINE_S = 5.0
SHAKES = b"\x16"  # the first byte of what TLS answers to a hello
RIGHT = Nonces(NONCE, NONCE)
ANSWERS = [
    ANSWER.pack(SEAT, NONCE, RIGHT.proof(KEY, b"caller", SEAT)),
    ANSWER.pack(SEAT + 1, NONCE, RIGHT.proof(KEY, b"caller", SEAT + 1)),
    ANSWER.pack(SEAT, NONCE, RIGHT.proof(b"another", b"caller", SEAT)),
]
GREETINGS = [GREETING.pack(MARK, NONCE) + RIGHT.proof(KEY, b"listener", SEAT), GREETING.pack(MARK, NONCE)]


@contextmanager
def one_nonce() -> Iterator[None]:
    """So that there are right answers to be mutated."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (doors, proofs):
            patch.setattr(module, "secrets", SimpleNamespace(token_bytes=lambda count: NONCE[:count]))
        yield


@cache
def entry(*, tls: bool) -> tuple[Door, socket.socket]:
    """Of this process, for all inputs: none may break it for the next."""
    listener = listening(socket.AF_INET, ("127.0.0.1", 0)) if tls else listening(socket.AF_UNIX, "")
    door = Door([listener], OURS)
    door._refusals.note = lambda *_: None  # type: ignore[method-assign] # tested elsewhere
    return door, listener


def answer(data: bytes) -> None:
    """As who calls, within a plain connection.

    Raises:
        PeerUnreachable: he is not let in.
    """
    door, listener = entry(tls=False)
    with one_nonce(), socket.socket(socket.AF_UNIX) as stranger:
        door.admit({SEAT: KEY})
        stranger.settimeout(DEADLINE_S)
        stranger.connect(listener.getsockname())
        assert stranger.recv(GREETING.size) == GREETING.pack(MARK, NONCE)
        if heard_after(stranger, data) != RIGHT.proof(KEY, b"listener", SEAT):
            raise PeerUnreachable("not let in")
    door.remove(SEAT)


def begin_tls(data: bytes) -> None:
    """As who calls where TLS is asked for.

    Raises:
        PeerUnreachable: nobody shakes hands with him.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proofs, "ENCRYPT_LOOPBACK", True)
        _, listener = entry(tls=True)
        with socket.create_connection(listener.getsockname(), DEADLINE_S) as stranger:
            if heard_after(stranger, data)[:1] != SHAKES:
                raise PeerUnreachable("not let in")


def heard_after(stranger: socket.socket, data: bytes) -> bytes:
    """All that is answered; a time-out where the door still waits for more of who has said his last."""
    heard = b""
    with suppress(ConnectionError):
        stranger.sendall(data)
    with suppress(OSError):
        stranger.shutdown(socket.SHUT_WR)
    with suppress(ConnectionError):
        while len(heard) < PROOF_BYTES and (more := stranger.recv(4096)):
            heard += more
    return heard


def be_greeted(data: bytes) -> None:
    """As a member to whom somebody says that."""
    mine, theirs = socket.socketpair()
    with one_nonce(), mine, theirs:
        theirs.sendall(data[: 1 << 16])
        theirs.shutdown(socket.SHUT_WR)
        try:
            prove(mine, SEAT, KEY, time.monotonic() + DEADLINE_S)
        except OSError as exc:  # as `connect_to` does
            raise PeerUnreachable(proofs.why(exc)) from exc


def hello_of_tls() -> bytes:
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        OURS.client_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="gradsync").do_handshake()
    return outgoing.read()


TARGETS = [
    Target("door", answer, ANSWERS),
    Target("door-tls", begin_tls, [hello_of_tls()]),
    Target("greeting", be_greeted, GREETINGS),
]
