"""Trainings over TCP: whatever a data connection may meet ends the training in one clear line, or not at all."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial

import numpy as np
import pytest

from common.errors import ChunkCorrupt, PeerLost, PeerStalled, PeerUnreachable, ProtocolError
from common.network.gradsync_pb2 import Plane, Served, ServerMessage, TrainerMessage
from common.network.links import FRAME, MAGIC
from common.network.tls_sockets import is_encrypted
from common.tensors.arena import Arena, FloatArray
from common.tensors.optimizers import SGD
from ps.client.client import Client
from ps.coordinator.coordinator import Coordinator
from ps.coordinator.servicer import ParameterServer
from ps.planes.data_connection import NEAR_BYTES, DataConnection
from ps.planes.wire_format import HEADER, TAG_BYTES
from tests.support.commands import until
from tests.support.credentials import encrypted
from tests.support.crowds import Crowd
from tests.support.groups import on_threads
from tests.support.sessions import (
    DEADLINE_S,
    RATE,
    addresses,
    as_trainer,
    assert_all,
    errors_of,
    expected_after,
    failure_of,
    lying,
    make_arena,
    parameters,
    serving,
    take_step,
)

GRADIENTS = TrainerMessage.DESCRIPTOR.fields_by_name["gradients"].number
PARAMETERS = ServerMessage.DESCRIPTOR.fields_by_name["parameters"].number


def connection_of(client: Client) -> DataConnection:
    return client._planes._connections[client._servers.sessions[0].name]


def socket_of(client: Client) -> socket.socket:
    return connection_of(client)._link.connection


def frame(nbytes: int, *, field: int = GRADIENTS, start: int = 0, step: int = 0, bucket: int = 0) -> bytes:
    """The header of a frame that announces so many bytes."""
    return FRAME.pack(MAGIC, nbytes, 0, 0) + HEADER.pack(0, field, 0, bucket, step, start)


WRONG: dict[str, tuple[bytes, str]] = {
    "noise": (bytes(range(1, 256)), "rank 1 sent something that is not a GradSync frame"),
    "a request": (b"GET / HTTP/1.1\r\nHost: here, there, everywhere\r\n\r\n", "rank 1 sent something that is not a"),
    "4 GB": (frame((1 << 32) - 4), "rank 1 announced 4,294,967,292 bytes of words from 0 on, of Shard(start=0,"),
    "more than a piece": (frame(NEAR_BYTES + 4), "rank 1 announced 4,194,308 bytes of words from 0 on, of Shard("),
    "words behind the last": (frame(64, start=1 << 40), "rank 1 announced 64 bytes of words from 1099511627776 on"),
    "a part of a word": (frame(6), "rank 1 announced 6 bytes of words from 0 on"),
    "no words": (frame(0), "rank 1 announced 0 bytes of words from 0 on"),
    "a large message": (
        FRAME.pack(MAGIC, 1 << 31, 0, 0) + bytes(TAG_BYTES),
        "rank 1 announced a message of 2,147,483,648 bytes, more than 4,194,304",
    ),
    "words of no message": (frame(64, field=99), "rank 1 sent a message that cannot be decoded (no words have the"),
    "words of a message without": (frame(64, field=1), "rank 1 sent a message that cannot be decoded (no words have"),
    "bytes that are no message": (
        FRAME.pack(MAGIC, 1, 0, 0) + bytes(TAG_BYTES) + b"\x0a",
        "rank 1 sent a message that cannot be decoded",
    ),
    "another step's words": (frame(64, step=7) + bytes(64), "rank 1 sent step 7, this is step 1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_nobody_can_mean_fails_all_by_the_rank_that_sent_it(what: str) -> None:
    data, text = WRONG[what]

    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 1:
            socket_of(client).send(data)
            client._servers.wait(lambda _: False, "watching")
        take_step(client, arena)

    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body, data_plane="tcp"))
        assert_all([*errors, failure_of(server)], ProtocolError, text)


def test_over_tls_servers_and_trainers_give_the_same_bits() -> None:
    def body(client: Client, arena: Arena) -> FloatArray:
        for _ in range(3):
            take_step(client, arena)
        assert is_encrypted(socket_of(client))
        return arena.parameters.copy()

    with encrypted(), serving(2) as (server,):
        results = on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body, data_plane="tcp"))
        server.wait()
    for result in results:
        assert result.tobytes() == expected_after(3, 2, make_arena(0)).tobytes()


@pytest.mark.parametrize("kind", ["plain", "TLS"])
def test_a_crowd_of_strangers_at_the_data_port_harms_nobody(kind: str) -> None:
    """While the group meets, and while it trains."""

    def body(client: Client, arena: Arena) -> FloatArray:
        port = client._servers.sessions[0].joined.data_port
        take_step(client, arena)
        with Crowd([port], 250):
            take_step(client, arena)
            with Crowd([port], 20):
                take_step(client, arena)
        return arena.parameters.copy()

    with encrypted() if kind == "TLS" else nullcontext(), serving(2) as (server,):
        with Crowd([server._coordinator.data_port], 500):
            results = on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body, data_plane="tcp"))
        server.wait()
    for result in results:
        assert result.tobytes() == expected_after(3, 2, make_arena(0)).tobytes()


def close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def reset(connection: socket.socket) -> None:
    """The descriptor stays, whose thread uses it, as that of a connection that has ended."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    ours, theirs = socket.socketpair()
    theirs.close()
    os.dup2(ours.fileno(), connection.fileno(), inheritable=False)
    ours.close()


@pytest.mark.parametrize("end", [close, reset])
def test_a_data_connection_that_ends_ends_the_training_and_names_its_rank(end: Callable[[socket.socket], None]) -> None:
    """As by a firewall in between; the session stands."""

    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 1:
            end(socket_of(client))
        take_step(client, arena)

    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body, data_plane="tcp"))
        text = "rank 1 died at step 1: its connection closed without a goodbye"
        assert_all([errors[0], failure_of(server)], PeerLost, text)
        assert isinstance(errors[1], PeerLost)


@pytest.mark.parametrize("comes", [True, False])
def test_a_step_that_a_server_has_ended_counts_also_where_its_failure_overtakes_the_result(comes: bool) -> None:
    """A failure is told over gRPC. If the result does not follow, the failure is told after all."""

    def body(client: Client, arena: Arena) -> FloatArray:
        take_step(client, arena)
        servers = client._servers
        inbox, take = servers.sessions[0].inbox, servers.sessions[0].inbox.take

        def take_late(message: ServerMessage, words: FloatArray | None = None) -> None:
            if message.WhichOneof("kind") == "served":
                until(lambda: servers.error is not None, "the failure")
            if comes or message.WhichOneof("kind") != "served":
                take(message, words)

        if client.rank == 0:
            inbox.take = take_late  # type: ignore[method-assign]
        take_step(client, arena)
        if client.rank == 1:
            raise ValueError("no more")
        results.append(arena.parameters.copy())
        take_step(client, arena)
        return arena.parameters

    results: list[FloatArray] = []
    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body, data_plane="tcp"))
        assert_all([errors[0], failure_of(server)], PeerLost, "rank 1 left at step 2 with ValueError: no more")
    assert [each.tobytes() for each in results] == [expected_after(2, 2, make_arena(0)).tobytes()] * comes


def test_a_server_that_fails_still_sends_what_a_step_gave() -> None:
    """More of it than the kernel takes at once, to a trainer that takes none of it before it hears of the failure."""

    def large(rank: int) -> Arena:
        return make_arena(rank, [("weight", (4_000_000,))], bucket_bytes=1 << 22)

    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        inbox, place = client._servers.sessions[0].inbox, client._servers.sessions[0].inbox.place
        if client.rank == 0:
            inbox.place = lambda chunk, size: place(chunk, size) if inbox.error else None  # type: ignore[method-assign]
        take_step(client, arena)
        if client.rank == 1:
            raise ValueError("no more")
        results.append(arena.parameters.copy())
        take_step(client, arena)

    results: list[FloatArray] = []
    with serving(2) as (server,), ThreadPoolExecutor(1) as beside:
        closed = beside.submit(lambda: (failure_of(server), server.close()))
        trainers = partial(as_trainer, [server.address], nranks=2, body=body, arena_of=large, data_plane="tcp")
        errors = errors_of(2, lambda rank: trainers(rank=rank))
        closed.result(DEADLINE_S)
        assert_all([errors[0]], PeerLost, "rank 1 left at step 2 with ValueError: no more")
    assert [each.tobytes() for each in results] == [expected_after(2, 2, large(0)).tobytes()]


def test_a_damaged_frame_is_an_error_that_names_who_sent_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums are on between hosts."""
    monkeypatch.setattr("common.network.links.on_loopback", lambda connection: False)

    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 1:
            words = np.ones(16, np.float32)
            tag = HEADER.pack(0, GRADIENTS, 0, 0, 1, 0)
            header = FRAME.pack(MAGIC, 64, connection_of(client)._link.checksum(words, tag), 0) + tag
            socket_of(client).send(header + (2 * words).tobytes())
            client._servers.wait(lambda _: False, "watching")
        take_step(client, arena)

    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body, data_plane="tcp"))
        text = "data from rank 1 were damaged on their way: checksum"
        assert_all([*errors, failure_of(server)], ChunkCorrupt, text)


def test_a_data_port_out_of_reach_leaves_grpc_with_one_line_unless_it_must_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = taken.getsockname()[1]
    monkeypatch.setattr(Coordinator, "desk", "gradsync-elsewhere")
    monkeypatch.setattr(Coordinator, "data_port", closed)
    why = f"its data port 127.0.0.1:{closed} was not reached within 5 s (Connection refused)"
    with serving(1) as (server,), Client([server.address], 0, 1) as client:
        arena = make_arena(0)
        client.register(arena, SGD())
        assert client.data_plane == "grpc"
        take_step(client, arena)
        assert arena.parameters.tobytes() == expected_after(1, 1, arena).tobytes()
    name = f"server 0 at {server.address}"
    line = f"gradsync: rank 0 and {name} exchange data over gRPC, which is slower: {why}\n"
    assert capfd.readouterr().err == line
    with serving(1) as (server,), Client([server.address], 0, 1, data_plane="tcp") as client:
        with pytest.raises(PeerUnreachable) as caught:
            client.register(make_arena(0), SGD())
        assert str(caught.value) == (
            f"rank 0 cannot exchange data with server 0 at {server.address} over TCP: {why}; open that port, which the "
            "server's --data-port fixes, or use --data-plane auto or grpc"
        )
    assert capfd.readouterr().err == ""


def test_where_there_are_no_ports_there_is_no_data_port(tmp_path_factory: pytest.TempPathFactory) -> None:
    address = f"unix-abstract:gradsync-test-{tmp_path_factory.getbasetemp().name}"
    with (
        ParameterServer(address, 1) as server,
        Client([server.address], 0, 1, data_plane="tcp") as client,
        pytest.raises(PeerUnreachable, match="over TCP: it has no data port; "),
    ):
        client.register(make_arena(0), SGD())


def test_the_data_port_can_be_chosen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with ParameterServer("127.0.0.1:0", 1, data_port=free) as server:
        client, arena = Client([server.address], 0, 1, data_plane="tcp"), make_arena(0)
        with client:
            client.register(arena, SGD())
            assert (client.data_plane, socket_of(client).getpeername()) == ("tcp", ("127.0.0.1", free))
            take_step(client, arena)
        server.wait()


def test_a_server_that_answers_with_a_connection_that_was_not_opened_is_refused() -> None:
    def answers(heard: Iterator[TrainerMessage]) -> Iterator[ServerMessage]:
        yield from [ServerMessage(plane=Plane(kind="tcp")), parameters(0, 64), ServerMessage(served=Served(step=0))]
        yield from (ServerMessage() for _ in heard)  # the stream stays open until the trainer has gone

    arena = make_arena(0, [("w", (64,))])
    with (
        lying(answers) as address,
        closing(Client([address], 0, 1, data_plane="grpc")) as client,
        pytest.raises(ProtocolError, match=r"answered with a data connection that was not opened$"),
    ):
        client.register(arena, SGD())


LIES: dict[str, tuple[bytes, str]] = {
    "noise": (bytes(range(1, 256)), " sent something that is not a GradSync frame"),
    "words outside": (frame(64, field=PARAMETERS, start=1 << 20, step=2), " sent elements 1048576..1048592 outside"),
    "another step's": (frame(64, field=PARAMETERS, step=9), " sent parameters of step 9, expected 2"),
    "a part of a word": (frame(3, field=PARAMETERS, step=2), " announced 3 bytes of parameters"),
}


@pytest.mark.parametrize("what", LIES)
def test_a_trainer_writes_nothing_that_its_server_cannot_mean(what: str) -> None:
    data, text = LIES[what]
    with serving(1) as (server,), closing(Client([server.address], 0, 1, data_plane="tcp")) as client:
        arena = make_arena(0)
        client.register(arena, SGD(learning_rate=RATE))
        take_step(client, arena)
        before = arena.parameters.tobytes()
        (theirs,) = server._coordinator._planes._connections
        theirs._link.connection.send(data)
        until(lambda: client._servers.error is not None, "the trainer to hear it")
        with pytest.raises(ProtocolError) as caught:
            client.check()
        assert str(caught.value).startswith(f"server 0 at {addresses([server])[0]}{text}")
        assert arena.parameters.tobytes() == before


def test_who_is_ahead_of_a_trainer_that_falls_silent_is_not_named_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read from for a while, and so is its commit."""
    monkeypatch.setattr("ps.coordinator.data_planes.NEAR_AHEAD_BYTES", 64)
    monkeypatch.setattr("ps.planes.even_pace.PATIENCE_S", 0.3)
    over = threading.Event()

    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 1:
            assert over.wait(DEADLINE_S)
        try:
            take_step(client, arena)
        finally:
            over.set()

    with serving(3, timeout=0.5) as (server,):
        errors = errors_of(3, lambda rank: as_trainer([server.address], rank, 3, body, data_plane="tcp"))
        text = "rank 1 did not take part in step 1 for 0.5 s"
        assert_all([*errors, failure_of(server)], PeerStalled, text)
