"""Parsers of what ranks of a ring, and callers of a rendezvous, send."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from collective.call_tags import CALLS, OPERATIONS, Tag
from collective.membership.joining import parts_of
from collective.membership.messages import Peer
from collective.nccl.seat import read_note
from collective.shared_memory.agree import NOTE, PLACE, check
from collective.transports.tcp import TcpTransport
from common import __version__
from common.errors import PeerLost
from common.network.gradsync_pb2 import JoinRequest
from common.network.links import FRAME, MAGIC
from common.network.rendezvous import Roster, read_join
from common.system.handover import LABEL, Link
from common.system.memory import Segment, Unreachable
from tests.fuzz.inputs import filled
from tests.fuzz.target import Target

__all__ = ["TARGETS"]

OUT = np.zeros(16, np.float32)
SEGMENT = Segment(64)
TAG = Tag(epoch=0, step=12, bucket=3, phase=1, chunk=0, piece=0)


def hear(data: bytes) -> None:
    """As a rank that has a socket to another one."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        peer = Peer(1, theirs, lambda: 0.0)
        mine.setblocking(False)
        with suppress(BlockingIOError):
            mine.sendall(data[: 1 << 17])
        for _ in range(8):
            peer.read(timeout=0.1)
        peer.close()
        if peer.failure:
            raise peer.failure[0]


class NoMesh:
    """Of a rank whose peers are gone once nothing is left to read."""

    rank, nranks, sockets = 0, 2, ()
    peers: Mapping[int, Peer] = MappingProxyType({})

    def check(self, *_: object) -> None:
        raise PeerLost("rank 1 died")

    def close(self, _: str) -> None:
        pass


def receive(data: bytes) -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.sendall(data[: 1 << 16])
        mine.shutdown(socket.SHUT_WR)
        transport = TcpTransport(NoMesh(), {1: theirs}, checksum="on")  # type: ignore[arg-type]
        transport.receive(1, OUT, TAG)


def framed(message: Any) -> bytes:
    text = json.dumps(message).encode()
    return struct.pack("<I", len(text)) + text


def compare(data: bytes) -> None:
    """What ranks in shared memory leave for one another before a call."""
    mine = NOTE.pack(12, 0, 3, 1, 0, 0, 64, PLACE.pack(1, 64))
    note = data[: NOTE.size].ljust(NOTE.size, b"\0")
    check(mine, note, 1)


def hand_over(data: bytes) -> None:
    """A label, with a descriptor of what the first byte says."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kinds = (lambda: os.dup(SEGMENT.descriptor), lambda: os.memfd_create("x"), lambda: os.open(os.devnull, os.O_RDWR))
    with mine, Link(theirs) as link:
        descriptors = [kinds[data[0] % 4]()] if data and data[0] % 4 < 3 else []
        try:
            socket.send_fds(mine, [data[1:4097] or b"\0"], descriptors)
        finally:
            for each in descriptors:
                os.close(each)
        for key, descriptor, nbytes in link.taken():
            Segment(nbytes, descriptor=descriptor, key=key).close()


def join(data: bytes) -> None:
    """At the roster of a single rank."""
    Roster(1).wait_for_all(read_join(data), 0.0)


def requests() -> list[bytes]:
    request = JoinRequest(version=__version__, rank=0, nranks=1, backend="shm", address="|x|y", note=b"note")
    return [request.SerializeToString(), JoinRequest(version="0", rank=9, nranks=3).SerializeToString()]


MESSAGES = [
    *({"leave": ""}, {"leave": "LayoutMismatch: x"}, {"leave": "y", "because": ["PeerLost", "rank 2 died", 2]}),
    *({"waiting?": 1}, {"waiting!": 0.5}, {"say": ""}, {"note": [1, -2, 3]}, {"segment": 1, "nbytes": 64}),
]


def sent_as(tag: Tag) -> bytes:
    checksum = xxh3_64_intdigest(OUT.tobytes(), xxh3_64_intdigest(tag.pack())) & 0xFFFFFFFF
    return FRAME.pack(MAGIC, OUT.nbytes, checksum, 0) + tag.pack() + OUT.tobytes()


FRAMES = [framed(each) for each in MESSAGES] + [framed({"piece": [0, 3, True]}) + b"abc" + framed({"say": ""})]
TAGS = [Tag(0, 12, 3, c + OPERATIONS * k, 0, 0) for c in range(len(CALLS)) for k in (0, 7)]
DATA = [sent_as(tag) for tag in (TAG, *TAGS)]
NOTES = [NOTE.pack(12, 0, 3, phase, 0, 0, 64, PLACE.pack(1, 64)) for phase in (1, 9, 65535)]
TEXTS = ["", "shm", __version__, "a" * 300, "|", "\0"]
TARGETS = [
    Target("mesh", hear, FRAMES),
    Target("tcp-frames", receive, DATA),
    Target("call-tags", lambda data: str(Tag.unpack(data[:24].ljust(24, b"\0"))), [tag.pack() for tag in TAGS]),
    Target("meeting-notes", compare, NOTES),
    Target("handover", hand_over, [b"\0" + LABEL.pack(bytes(16), n) for n in (0, 1, 64)], errors=(Unreachable,)),
    Target("join", join, requests(), filled(JoinRequest, TEXTS)),
    Target("addresses", lambda data: parts_of(1, data.decode(errors="replace")), [b"127.0.0.1 80|name|host", b"|n|h"]),
    Target("gpu-notes", lambda data: read_note(1, data), [b'{"id": "00ff", "gpu": "GPU-1"}']),
]
