"""Sockets between processes: how much the kernel keeps of what nobody reads."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from common.network.sockets import KEPT_BYTES, keep_little


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection, of which the first can keep little itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
        with receiver:
            sender.setblocking(False)
            yield sender, receiver


def sent_unread(sender: socket.socket) -> int:
    """Bytes until the sender is held up."""
    count = 0
    try:
        while count < 100 * KEPT_BYTES:
            count += sender.send(bytes(65536))
    except BlockingIOError:
        pass
    return count


def test_a_near_sender_is_held_up_soon(pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    keep_little(receiver, near=1.0)
    assert 65536 < sent_unread(sender) <= 2 * KEPT_BYTES + 4 * 65536  # the kernel doubles both, for its own use


def test_for_a_far_one_nothing_changes(pair: tuple[socket.socket, socket.socket]) -> None:
    before = pair[1].getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    keep_little(pair[1], near=-1.0)
    assert pair[1].getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == before
