"""Row 13: what is larger than it can be is refused before memory is taken for it; a stranger's ends his call only."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pytest

import collective
import ps
from collective.group import Group
from common.errors import GradSyncError
from common.launch.ranks import abstract_address
from common.network.gradsync_pb2 import ServerMessage, Slot, TrainerMessage
from common.network.links import FRAME, MAGIC
from ps.connection import Connection
from ps.planes.methods import JOIN, SESSION
from ps.planes.wire_format import TAG_BYTES
from tests.faults.jobs import Start
from tests.support.channels import member_channel
from tests.support.commands import DEADLINE_S, start_server, until
from tests.support.groups import transport_of

ROUND = int(os.environ.get("GRADSYNC_FAULTS", "0") or 0)  # another one fuzzes with other inputs
MOST_GROWTH = 64 << 20
HUGE = (1 << 32) - 16
UNBOUNDED = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


def peak_of(pid: int) -> int:
    """The most memory that a process has had, bytes; 0: it is no more."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return 0


def a_million_tensors() -> bytes:
    message = TrainerMessage()
    message.register.slots.extend([Slot()] * 1_000_000)
    return message.SerializeToString()


EXHAUSTED = str(grpc.StatusCode.RESOURCE_EXHAUSTED)
TOO_LARGE: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "a join": (JOIN, lambda: bytes(8 << 20), EXHAUSTED),
    "a join of a megabyte": (JOIN, lambda: bytes(1 << 20), EXHAUSTED),
    "a first message": (SESSION, lambda: bytes(8 << 20), EXHAUSTED),
    "a million tensors": (
        SESSION,
        a_million_tensors,
        "ProtocolError: a caller's first message has 2,000,004 bytes, more than 65,536",
    ),
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_a_member_without_a_seat_is_refused_and_the_training_goes_on(what: str, start: Start) -> None:
    method, make, how = TOO_LARGE[what]
    server, address = start_server(start, 1)
    with ps.connect([address], 0, 1) as client:
        client.register(np.zeros(1000, np.float32))
        before = peak_of(server.process.pid)
        assert answer(address, method, make()) == how
        assert peak_of(server.process.pid) - before < MOST_GROWTH
        gradients = np.full(1000, 3, np.float32)
        client.push_pull(gradients)
        assert set(gradients.tolist()) == {3.0}
    server.ended_well()


def answer(address: str, method: str, said: bytes) -> str:
    """What is told to a member who says that, and no more."""
    with member_channel(address, UNBOUNDED) as channel:
        try:
            (told,) = channel.stream_stream(method)(iter([said]), timeout=DEADLINE_S)
            failure = ServerMessage.FromString(told).failure
            return f"{failure.kind}: {failure.message}"
        except grpc.RpcError as error:
            return str(error.code())


def test_a_trainer_that_announces_too_much_ends_the_training_by_name(start: Start) -> None:
    """The payload's length, of a frame on its data connection."""
    server, address = start_server(start, 1)
    client = ps.connect([address], 0, 1, "tcp")
    client.register(np.zeros(1000, np.float32))
    before = peak_of(server.process.pid)
    socket_of(client).sendall(FRAME.pack(MAGIC, HUGE, 0, 0) + bytes(TAG_BYTES))
    until(lambda: peak_of(server.process.pid) - before > MOST_GROWTH or server.process.poll() is not None, "its end")
    assert server.code == 5
    assert "rank 0" in server.err
    with pytest.raises(GradSyncError), client:
        client.push_pull(np.zeros(1000, np.float32))


def socket_of(client: Connection) -> socket.socket:
    (connection,) = client._client._planes._connections.values()
    return connection._link.connection


def said(message: object) -> bytes:
    text = json.dumps(message).encode()
    return struct.pack("<I", len(text)) + text


FRAMES: dict[str, tuple[str, bytes]] = {
    "a message's length": ("mesh", struct.pack("<I", HUGE)),
    "a piece's length": ("mesh", said({"piece": [0, 1 << 60, False]})),
    "a negative length": ("mesh", said({"piece": [0, -1, False]})),
    "a frame's length": ("data", FRAME.pack(MAGIC, HUGE, 0, 0) + bytes(24)),
    "no frame": ("data", b"\xff" * 64),
}


@pytest.mark.parametrize("what", FRAMES)
def test_a_rank_that_announces_too_much_is_named_and_left(what: str, start: Start) -> None:
    place = abstract_address("test")
    other = start("tests.faults.one_rank", place)
    with collective.connect(1, 2, place, backend="tcp", algorithm="ring") as group:
        until(lambda: other.out.startswith("ready"), "rank 0")
        (connection,) = sockets_of(group, FRAMES[what][0])
        connection.sendall(FRAMES[what][1])
        assert other.code == 0, other.err
        with pytest.raises(GradSyncError):
            group.barrier()
    _, line = other.out.splitlines()
    kind, grown, text = line.split(" ", 2)
    assert (kind, int(grown) < MOST_GROWTH) == ("ProtocolError", True), line
    assert "rank 1" in text


def sockets_of(group: Group, which: str) -> list[socket.socket]:
    transport = transport_of(group)
    ends = transport._mesh.peers.values() if which == "mesh" else transport._links.values()
    return [end.connection for end in ends]


FUZZED = ("mesh", "tcp-frames", "data-from-trainer", "door")


@pytest.mark.parametrize("name", FUZZED)
def test_ten_thousand_fuzzed_frames(name: str, start: Start) -> None:
    """In a process of its own, in which memory is scarce."""
    job = start("tests.fuzz", name, "--inputs", 10_000, "--seed", ROUND, "--workers", 1)
    assert job.code == 0, job.out
    assert job.out.splitlines()[1].split()[:2] == [name, "10,000"]
