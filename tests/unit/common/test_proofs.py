"""What both ends of a connection show each other: who calls believes nobody without, and what is to be encrypted is."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from common.credentials.credentials import Credentials
from common.errors import PeerUnreachable
from common.network import proofs
from common.network.proofs import ANSWER, CLOSED, GREETING, MARK, NONCE_BYTES, Nonces, connect_to, encrypts
from tests.support.credentials import with_secret

HOST = "127.0.0.1"
DEADLINE_S = 20.0
OURS = with_secret(1)


@dataclass
class Ends:
    """Of a connection between these addresses."""

    own: str
    other: str
    family: int = socket.AF_INET

    def getsockname(self) -> tuple[str, int]:
        return self.own, 1

    def getpeername(self) -> tuple[str, int]:
        return self.other, 2


@pytest.mark.parametrize(
    ("own", "other", "family", "between_hosts"),
    [
        ("127.0.0.1", "127.0.0.1", socket.AF_INET, False),
        ("127.0.0.1", "127.0.0.2", socket.AF_INET, False),
        ("::1", "::1", socket.AF_INET6, False),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", socket.AF_INET6, False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", socket.AF_INET6, True),
        ("", "", socket.AF_UNIX, False),
        ("10.0.0.1", "10.0.0.2", socket.AF_INET, True),
        ("10.0.0.1", "10.0.0.1", socket.AF_INET, True),
        ("127.0.0.1", "10.0.0.1", socket.AF_INET, True),
        ("fe80::1%eth0", "fe80::2%eth0", socket.AF_INET6, True),
    ],
)
def test_what_is_between_hosts_is_encrypted_unless_nobody_has_credentials(
    own: str, other: str, family: int, between_hosts: bool
) -> None:
    ends: Any = Ends(own, other, family)
    assert encrypts(ends, OURS) == between_hosts
    assert not encrypts(ends, Credentials("none", "--insecure"))


def answered_by(answer: Callable[[socket.socket], None], *, seconds: float = DEADLINE_S) -> str:
    """What a call ends with where somebody else answers."""
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(PeerUnreachable) as caught:
            connect_to((HOST, listener.getsockname()[1]), 3, b"key", OURS, seconds, who="rank 3", peer="")
        thread.join()
        return str(caught.value)


def read_to_the_end(connection: socket.socket) -> None:
    connection.settimeout(DEADLINE_S)
    while connection.recv(1000):
        pass


def test_another_service_is_told_nothing() -> None:
    heard: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        connection.sendall(b"220 mail.example.com")
        heard.append(connection.recv(1000))

    assert answered_by(answer) == "did not let rank 3 in (somebody else answers there)"
    assert heard == [b""]


def test_a_listener_that_does_not_know_the_key_is_not_believed() -> None:
    """Nor one that says again what it has overheard."""
    for heard in (False, True):

        def answer(connection: socket.socket, heard: bool = heard) -> None:
            connection.sendall(GREETING.pack(MARK, bytes(NONCE_BYTES)))
            assert len(connection.recv(ANSWER.size, socket.MSG_WAITALL)) == ANSWER.size
            ports = connection.getsockname()[1], connection.getpeername()[1]
            before = Nonces(bytes(NONCE_BYTES), bytes(NONCE_BYTES), ports)  # when only the caller's nonce was another
            connection.sendall(before.proof(b"key", b"listener", 3) if heard else bytes(32))

        assert answered_by(answer) == "did not let rank 3 in (somebody else answers there)"


@pytest.mark.parametrize("greets", [False, True])
def test_one_that_ends_meanwhile_has_closed_the_connection(greets: bool) -> None:
    def answer(connection: socket.socket) -> None:
        if greets:
            connection.sendall(GREETING.pack(MARK, bytes(NONCE_BYTES)))
            connection.recv(ANSWER.size, socket.MSG_WAITALL)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset

    assert answered_by(answer) == f"did not let rank 3 in ({CLOSED})"


def test_one_that_does_not_encrypt_is_told_nothing_by_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "ENCRYPT_LOOPBACK", True)

    def answer(connection: socket.socket) -> None:
        connection.sendall(GREETING.pack(MARK, bytes(NONCE_BYTES)))

    assert answered_by(answer) == "did not let rank 3 in (it does not encrypt; give all the same credentials)"


def test_a_listener_that_says_nothing_is_waited_for_no_longer_than_the_limit() -> None:
    begin = time.monotonic()
    assert answered_by(read_to_the_end, seconds=0.3) == "did not let rank 3 in (timed out)"
    assert 0.3 <= time.monotonic() - begin < DEADLINE_S / 2


def test_where_nobody_listens_the_error_says_so() -> None:
    with socket.create_server((HOST, 0)) as taken_port:
        number = taken_port.getsockname()[1]
    with pytest.raises(PeerUnreachable) as caught:
        connect_to((HOST, number), 0, b"", OURS, 5.0, who="rank 0", peer="")
    assert str(caught.value) == "was not reached within 5 s (Connection refused)"
