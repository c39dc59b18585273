"""Row 8: a bit that flips above TCP is noticed, in a header or in the data; nothing damaged is averaged in."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from collective.call_tags import FORMAT, Tag
from collective.membership.liveness import Mesh
from collective.transports.tcp import TcpTransport
from common.errors import ChunkCorrupt, ProtocolError
from common.network.gradsync_pb2 import Chunk, Commit, Served, ServerMessage, TrainerMessage
from common.network.links import FRAME, Link
from ps.client.from_server import FromServer
from ps.client.inbox import Inbox
from ps.planes.data_connection import DataConnection, Receiver
from ps.planes.sealing import SEAL, Sealing
from ps.planes.tcp_plane import FromTrainer
from ps.planes.wire_format import HEADER, TAG_BYTES, Outgoing, tagged
from ps.store.shards import Shard
from tests.support.credentials import tcp_pair
from tests.support.wire import to_bytes

ROUND = int(os.environ.get("GRADSYNC_FAULTS", "0") or 0)  # another one flips other bits
FLIPS, DEADLINE_S = 1000, 20.0
VALUES = np.random.default_rng(8).standard_normal(1024).astype(np.float32)
TAG = Tag(epoch=1, step=12, bucket=3, phase=1, chunk=0, piece=0)
RESERVED = range(12, 16)  # of a frame, which nobody reads
CASES = [pytest.param(0, marks=pytest.mark.quick), *range(1, 10)]  # each a tenth


def flips(header_bytes: int, all_bytes: int, part: int) -> list[int]:
    """Bits: one of each byte of the header, and some of the whole, all together FLIPS."""
    rng = np.random.default_rng([ROUND, part])
    header = [8 * at + int(rng.integers(8)) for at in range(header_bytes)]
    return header + [int(bit) for bit in rng.integers(0, 8 * all_bytes, FLIPS // 10)]


def flipped(data: bytes, bit: int) -> bytes:
    found = bytearray(data)
    found[bit // 8] ^= 1 << bit % 8
    return bytes(found)


def on_the_wire(array: np.ndarray, tag: bytes) -> bytes:
    """A frame, with its checksum."""
    here, there = tcp_pair()
    with here, there:
        link = Link(here, len(tag), checksum="on")
        link.put(array, tag)
        return b"".join(bytes(part) for part in link.unsent)


@pytest.mark.parametrize("part", CASES)
def test_between_ranks(part: int) -> None:
    frame = on_the_wire(VALUES, TAG.pack())
    for bit in [-1, *flips(FRAME.size + FORMAT.size, len(frame), part)]:
        with ExitStack() as opened:
            ours, theirs = socket.socketpair()
            opened.enter_context(theirs)
            here, there = tcp_pair()
            transport = TcpTransport(Mesh(1, {0: ours}, timeout=DEADLINE_S), {0: here}, checksum="on")
            opened.callback(transport.close)
            there.sendall(frame if bit < 0 else flipped(frame, bit))
            there.close()
            out = np.zeros_like(VALUES)
            if bit < 0 or bit // 8 in RESERVED:
                transport.receive(0, out, TAG)
                assert out.tobytes() == VALUES.tobytes()
            else:
                with pytest.raises(ProtocolError):
                    transport.receive(0, out, TAG)


class Heard:
    """What came of a connection, and how it ended."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver, self.over = receiver, threading.Event()
        self.error: Exception | None = None

    def place(self, tag: bytes, nbytes: int) -> memoryview | None:
        return self._receiver.place(tag, nbytes)

    def take(self) -> None:
        self._receiver.take()

    def ended(self, error: Exception | None) -> None:
        self.error = error
        self.over.set()


@contextmanager
def checked() -> Iterator[None]:
    """As between hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.network.links.on_loopback", lambda _: False)
        yield


def received(data: bytes, receiver: Receiver) -> Exception | None:
    """With what the connection ended over which this came."""
    here, there = tcp_pair()
    heard = Heard(receiver)
    connection = DataConnection(here, peer="rank 1")
    connection.begin(heard)
    there.sendall(data)
    there.shutdown(socket.SHUT_WR)
    assert heard.over.wait(DEADLINE_S)
    connection.close()
    there.close()
    return heard.error


def at_a_server(data: bytes, sent: Outgoing) -> tuple[Exception | None, bool]:
    """How it ended, and whether anything but what was sent has been heard."""
    wrong: list[object] = []

    def hear(message: TrainerMessage, words: np.ndarray | None) -> None:
        right = words is not None and words.tobytes() == sent.words.tobytes()
        if not (right and message.gradients == sent.chunk):
            wrong.append(message)

    shard = Shard(0, 1 << 40)
    error = received(data, FromTrainer(1, shard, hear, lambda _: None, pace=None, wake=lambda: None))
    return error, bool(wrong)


def at_a_trainer(data: bytes, sent: Outgoing) -> tuple[Exception | None, bool]:
    """Likewise; that all has come is said behind it, undamaged."""
    inbox, start = Inbox("server 0", threading.Condition(), epoch=1), sent.chunk.start
    arena = np.zeros(start + sent.words.size, np.float32)
    inbox.begin(Shard(start, arena.size), arena)
    inbox.version = sent.chunk.step - 1
    served = ServerMessage(served=Served(epoch=1, step=sent.chunk.step))
    error = received(data + on_the_wire(*tagged(served)), FromServer(inbox))
    return error or inbox.error, inbox.version == sent.chunk.step and arena[start:].tobytes() != sent.words.tobytes()


WAYS = {"server": (TrainerMessage, "gradients", at_a_server), "trainer": (ServerMessage, "parameters", at_a_trainer)}


@pytest.mark.parametrize("part", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_between_a_server_and_a_trainer_over_tcp(way: str, part: int) -> None:
    kind, name, at = WAYS[way]
    number = kind.DESCRIPTOR.fields_by_name[name].number
    sent = Outgoing(number, Chunk(epoch=1, step=12, bucket=3, start=64), VALUES)
    with checked():
        frame = on_the_wire(*tagged(sent))
        assert at(frame, sent) == (None, False)
        for bit in flips(FRAME.size + TAG_BYTES, len(frame), part):
            error, wrong = at(flipped(frame, bit), sent)
            assert not wrong, bit
            length_or_checksum = 4 <= bit // 8 < 12  # more is waited for then, or the checksum is another
            assert isinstance(error, ProtocolError) or length_or_checksum or bit // 8 in RESERVED, (bit, error)


COMMIT = TrainerMessage(commit=Commit(epoch=1, step=12, learning_rate=0.125, update=True))
MESSAGES = (Outgoing(3, Chunk(epoch=1, step=12, bucket=3, start=64), VALUES), COMMIT)


@pytest.mark.parametrize("message", MESSAGES, ids=["words", "commit"])
def test_over_grpc_without_tls(message: Outgoing | TrainerMessage) -> None:
    sealing = Sealing(on=True)
    data = sealing.seal(to_bytes(message))
    assert sealing.unseal(data, "rank 1") == to_bytes(message)
    bits = [bit for part in range(10) for bit in flips(min(HEADER.size, len(data)), len(data), part)]
    for bit in [*bits, *range(8 * (len(data) - SEAL.size), 8 * len(data))]:
        with pytest.raises(ChunkCorrupt, match=r"^data from rank 1 were damaged on their way \("):
            sealing.unseal(flipped(data, bit), "rank 1")
