"""Parsers of what trainers and parameter servers send each other."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from common.errors import ProtocolError
from common.network.gradsync_pb2 import (
    Chunk,
    Gather,
    Parcel,
    Place,
    Plane,
    Served,
    ServerMessage,
    StatePiece,
    StatusReply,
    Taken,
    TrainerMessage,
)
from common.network.links import FRAME, MAGIC
from common.system.memory import Segment
from ps.client.from_server import FromServer
from ps.client.inbox import Inbox as TrainersInbox
from ps.client.mail import Mail
from ps.coordinator.servicer import decoded
from ps.planes.data_connection import DataConnection
from ps.planes.mailboxes import SLOT_BYTES, SLOTS, Mailbox
from ps.planes.protobuf_messages import state_of
from ps.planes.shared_memory import OthersMemory
from ps.planes.tcp_plane import FromTrainer
from ps.planes.wire_format import WITHOUT_WORDS, Outgoing, header_of, read_server
from ps.status import table_of
from ps.store.shards import Shard
from tests.fuzz.inputs import filled
from tests.fuzz.target import Target
from tests.support.numpy_optimizer import instead_of_paddle
from tests.support.trainer_messages import (
    LAYOUT,
    Setting,
    commit_message,
    configure_message,
    configured,
    gather_message,
    goodbye_message,
    gradient_message,
    keep_message,
    open_group,
    parameters_message,
    parameters_of,
    register_message,
    registered,
    running,
    update_message,
)
from tests.support.wire import to_bytes

__all__ = ["TARGETS"]

TEXTS = ["", "sgd", "adam", "momentum", "nonsense", "w", "b", "w_v", "b_v", "float32", "float64", "int8", "ssp:1"]
TEXTS += ["async", "geo:3", "ssp:99999999999", "PeerLost", "a" * 5000]


def said_to(make: Any) -> Any:
    """Any message as the first of rank 1, and then of rank 0, in a group that is made so."""

    def say(data: bytes) -> None:
        message = decoded(data, "rank 1")
        with pytest.MonkeyPatch.context() as patch:
            instead_of_paddle(patch)
            setting: Setting = make()
            try:
                for rank in (1, 0):
                    setting.group.handle(rank, message.message, message.words)
            finally:
                setting.group.fail(ProtocolError("over"))
                setting.group.close()

    return say


def entered() -> Setting:
    setting = open_group(2)
    for rank in range(2):
        hello = TrainerMessage()
        hello.hello.rank = rank
        setting.group.enter(hello, setting.inboxes[rank])
    return setting


def words(field: int, start: int, count: int, kind: Any = TrainerMessage) -> bytes:
    return to_bytes(Outgoing(field, Chunk(start=start), np.ones(count, np.float32)))


def through(receiver: Any, data: bytes) -> None:
    """As what a data connection brings."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.sendall(data[: 1 << 16])
        mine.shutdown(socket.SHUT_WR)
        connection = DataConnection(theirs, peer="rank 1")
        connection._receiver = receiver
        try:
            with suppress(EOFError, DecodeError):  # as the connection's thread does
                while connection._receive():
                    pass
        finally:
            os.close(connection._bell)


def from_trainer(data: bytes) -> None:
    through(FromTrainer(1, Shard(0, 64), lambda *_: None, lambda _: None, pace=None, wake=lambda: None), data)


def inbox() -> TrainersInbox:
    changed = threading.Condition()
    found = TrainersInbox("server 0", changed, 0, Mail(2, 0, changed))
    found.begin(Shard(0, 64), np.zeros(64, np.float32))
    return found


def from_server(data: bytes) -> None:
    through(FromServer(inbox()), data)


def hear_server(data: bytes) -> None:
    try:
        frame = read_server(data)
    except DecodeError:  # which gRPC makes an end of the session
        return
    heard = inbox()
    for _ in range(2):
        heard.take(frame.message, frame.words)
    if heard.has_state:
        state_of(heard.take_state())


def framed(payload: bytes, tag: bytes = WITHOUT_WORDS) -> bytes:
    return FRAME.pack(MAGIC, len(payload), 0, 0) + tag + payload


def take_note(data: bytes) -> None:
    """As a server whose trainer has written that into its mailbox."""
    mailbox = Mailbox(SEGMENT, 0, create=True)
    mailbox.put(b"note")
    mailbox._notes[:SLOT_BYTES] = data[:SLOT_BYTES].ljust(SLOT_BYTES, b"\0")
    note = mailbox.take()
    with suppress(DecodeError):
        TrainerMessage.FromString(note or b"")


def find_place(data: bytes) -> None:
    """In a memory that was handed over."""
    from common.system.memory import Unreachable

    with suppress(DecodeError):
        place = Place.FromString(data)
        with OthersMemory() as memory:
            memory._givers[SEGMENT.key] = memory._mapped[SEGMENT.key] = SEGMENT  # type: ignore[assignment]
            try:
                array = memory.array(place, 16)
            except Unreachable as exc:
                raise ProtocolError(str(exc)) from exc
            finally:
                memory._mapped.clear()
            assert array.size == 16


def show_status(data: bytes) -> None:
    from rich.console import Console

    with suppress(DecodeError):
        reply = StatusReply.FromString(data)
        with Console(file=None, quiet=True, width=200) as console:
            console.print(table_of(["there"], [reply]))


SEGMENT = Segment(SLOTS * SLOT_BYTES + 4096, key=b"k" * 16)
SERVERS = [
    ServerMessage(parameters=Chunk(start=0, data=bytes(64))),
    ServerMessage(served=Served(step=0)),
    ServerMessage(gathered=Gather(size=3, data=b"abc")),
    ServerMessage(state=StatePiece(key="w_v", dtype="float32", size=45, data=bytes(8))),
    ServerMessage(state=StatePiece(last=True, number=1)),
    ServerMessage(parcel=Parcel(rank=1, size=3, data=b"abc")),
    ServerMessage(taken=Taken(rank=1, bytes=9)),
    ServerMessage(plane=Plane(kind="tcp")),
]
REGISTERS = [register_message(1).SerializeToString(), register_message(1, optimizer=None).SerializeToString()]
TRAINERS = [
    *(gradient_message(1, 0, 0, 64, 80), gradient_message(1, 0, 1, 0, 64), commit_message(0), update_message(0)),
    *(gather_message(0, b"abc"), goodbye_message("x"), goodbye_message(), configure_message(1)),
    *(keep_message(), keep_message(2**63, 2**63)),
    parameters_message(0, parameters_of(0)),
    TrainerMessage(state=StatePiece(key="w_v", size=45, dtype="float32", data=bytes(4 * 45))),
    TrainerMessage(state=StatePiece(last=True, number=1)),
    TrainerMessage(parcel=Parcel(rank=0, size=3, data=b"abc")),
    TrainerMessage(taken=Taken(rank=0, bytes=9)),
]
SAID = [each.SerializeToString() for each in TRAINERS] + [*REGISTERS, words(3, 64, 16), words(2, 0, 16)]
MORE = filled(TrainerMessage, TEXTS)
TOLD = [each.SerializeToString() for each in SERVERS] + [words(1, 0, 16)]
TAG = header_of(Outgoing(3, Chunk(start=0), np.ones(4, np.float32)))
TAG_BACK = header_of(Outgoing(1, Chunk(start=0), np.ones(4, np.float32)))
PLACES = [Place(memory={"key": SEGMENT.key, "size": SEGMENT.nbytes}, offset=n).SerializeToString() for n in (0, 64)]
STATUS = StatusReply(shards=1, nranks=1, steps=5, state="training", trainers=[{"rank": 0, "steps": 5}])
SLOT = len(SAID[0]).to_bytes(2, "little") + SAID[0]
TARGETS = [
    Target("session-registering", said_to(entered), REGISTERS + SAID, MORE),
    Target("session-training", said_to(lambda: running(2)), SAID, MORE),
    Target("session-ssp", said_to(lambda: running(2, mode="ssp:1")), SAID, MORE),
    Target("session-program", said_to(lambda: configured(2)), SAID, MORE),
    Target("session-unnamed", said_to(lambda: registered(2)), SAID, MORE),
    Target(
        "data-from-trainer", from_trainer, [framed(SAID[2]), framed(bytes(16), TAG), framed(SAID[0]) + framed(SAID[4])]
    ),
    Target("data-from-server", from_server, [framed(each) for each in TOLD[:8]] + [framed(bytes(16), TAG_BACK)]),
    Target("from-server", hear_server, TOLD, filled(ServerMessage, TEXTS)),
    Target("mailbox", take_note, [SLOT, b"\xfe\x01" + bytes(510)]),
    Target("places", find_place, PLACES, filled(Place, TEXTS)),
    Target(
        "status",
        show_status,
        [STATUS.SerializeToString()],
        filled(StatusReply, TEXTS),
    ),
]
assert LAYOUT.length == 80
