"""The mesh over TLS: what has come is heard though the kernel does not tell of it, and damage is named."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from collective.membership.liveness import Mesh
from collective.membership.messages import LENGTH, frame
from common.errors import ProtocolError
from common.network.tls_sockets import TlsSocket
from tests.support.commands import until
from tests.support.credentials import shake_hands, tcp_pair

DEADLINE_S = 20.0


@pytest.fixture
def mesh_and_other() -> Iterator[tuple[Mesh, TlsSocket]]:
    """Rank 0 of two, and the other one's end."""
    ours, other = shake_hands(tcp_pair())
    mesh = Mesh(0, {1: ours}, timeout=DEADLINE_S)
    yield mesh, other
    mesh.close()
    other.close()


def answer_to(other: TlsSocket) -> object:
    """The next message from rank 0."""
    (size,) = LENGTH.unpack(other.recv(LENGTH.size))
    return json.loads(other.recv(size))


def test_a_question_behind_the_end_of_a_piece_is_answered_though_one_record_has_both(
    mesh_and_other: tuple[Mesh, TlsSocket],
) -> None:
    """By the thread, which sleeps until the kernel has something."""
    mesh, other = mesh_and_other
    other.sendall(frame({"piece": [0, 100, True]}) + bytes(50))
    until(lambda: mesh.peers[1].carried == 50, "the first half")
    other.sendall(bytes(50) + frame({"waiting?": 1}))
    assert answer_to(other) == {"waiting!": 0.0}


def test_what_was_damaged_is_an_error_that_names_the_rank(mesh_and_other: tuple[Mesh, TlsSocket]) -> None:
    mesh, other = mesh_and_other
    socket.socket.send(other, bytes.fromhex("1703030020") + bytes(32))  # a record that nobody has encrypted
    with pytest.raises(ProtocolError, match=r"^data from rank 1 were damaged or forged"):
        until(lambda: mesh.check(1), "the error")
