"""What a rank says beside the data and cannot be meant: it is named, and nobody hangs."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator

import pytest

from collective.membership.liveness import Mesh
from collective.membership.messages import MOST_BYTES, MOST_DESCRIPTORS, Peer
from common.errors import ProtocolError
from common.system.memory import Segment


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        yield mine, theirs


def framed(message: object) -> bytes:
    text = json.dumps(message).encode()
    return struct.pack("<I", len(text)) + text


WRONG = {
    "no JSON": struct.pack("<I", 4) + b"\xff\xff\xff\xff",
    "no object": framed([1]),
    "nothing known": framed({"x": 1}),
    "a note of words": framed({"note": ["x"]}),
    "a segment without memory": framed({"segment": 1, "nbytes": 64}),
    "a piece of too much": framed({"piece": [0, 1 << 40, False]}),
    "a piece of less than nothing": framed({"piece": [0, -1, False]}),
    "too long": struct.pack("<I", MOST_BYTES + 1),
    "a reason of another type": framed({"leave": 5}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_message_that_cannot_be_names_its_rank(what: str, ends: tuple[socket.socket, socket.socket]) -> None:
    mesh = Mesh(0, {1: ends[0]}, timeout=5.0)
    ends[1].sendall(WRONG[what])
    with pytest.raises(ProtocolError, match="rank 1"):
        mesh.take_segment(1, 1, "testing")
    mesh.close()


def test_descriptors_that_nobody_takes_are_given_back(ends: tuple[socket.socket, socket.socket]) -> None:
    peer, before = Peer(1, ends[0], lambda: 0.0), len(os.listdir("/proc/self/fd"))
    with Segment(64) as segment:
        while not peer.failure:
            socket.send_fds(ends[1], [framed({"say": ""})], [segment.descriptor] * 16)
            peer.read(timeout=0.1)
            assert len(peer._descriptors) <= MOST_DESCRIPTORS + 16
    assert isinstance(peer.failure[0], ProtocolError)
    peer.close()
    assert len(os.listdir("/proc/self/fd")) <= before
