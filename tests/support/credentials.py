"""Credentials for tests of connections, and connections that are encrypted though both ends are on this host."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from common.credentials.credentials import Credentials, using
from common.network import proofs
from common.network.tls_sockets import TlsSocket, secured

__all__ = ["encrypted", "shake_hands", "tcp_pair", "with_secret"]

DEADLINE_S = 20.0


def with_secret(number: int) -> Credentials:
    """Of a job with a token; equal numbers, equal tokens."""
    return Credentials("token", f"test {number}", bytes([number]) * 32)


@contextmanager
def encrypted(number: int = 1) -> Iterator[None]:
    """Every TCP connection that members of the job open is over TLS."""
    with pytest.MonkeyPatch.context() as patch, using(with_secret(number), warn=False):
        patch.setattr(proofs, "ENCRYPT_LOOPBACK", True)
        yield


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection on the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname(), DEADLINE_S)
        return listener.accept()[0], caller


def shake_hands(ends: tuple[socket.socket, socket.socket]) -> list[TlsSocket]:
    """Both ends of a connection, from now on over TLS; the first one's peer is "rank 1", the second one's "rank 0"."""
    ours, made = with_secret(1), list[TlsSocket]()
    for number, end in enumerate(ends):
        end.settimeout(DEADLINE_S)
        context = ours.client_context() if number else ours.server_context()
        made.append(secured(end, context, server=not number))
        made[-1].peer = f"rank {1 - number}"
    listener = threading.Thread(target=made[0].do_handshake)
    listener.start()
    made[1].do_handshake()
    listener.join()
    return made
