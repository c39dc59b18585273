"""Callers that do not keep to the protocol harm nobody who does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import grpc
import numpy as np
import pytest

from common.errors import PeerLost, ProtocolError, RendezvousError
from common.network import rpc
from common.network.gradsync_pb2 import (
    Chunk,
    Commit,
    Goodbye,
    Hello,
    Register,
    ServerMessage,
    TrainerMessage,
)
from common.tensors.arena import Arena, FloatArray
from common.tensors.optimizers import SGD
from ps.client.client import Client
from ps.client.joining import Joined, join
from ps.planes.methods import JOIN, SESSION
from ps.planes.wire_format import parts_of
from tests.support.channels import member_channel
from tests.support.groups import on_threads
from tests.support.sessions import (
    DEADLINE_S,
    RATE,
    as_trainer,
    assert_all,
    errors_of,
    expected_after,
    failure_of,
    make_arena,
    raw_session,
    serving,
    take_step,
)


def test_a_session_before_all_have_joined_is_refused() -> None:
    with serving(2) as (server,), raw_session(server.address, iter([])) as call:
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        error = rpc.translate(caught.value, server.address, "testing")
        assert isinstance(error, RendezvousError)
        assert "before all trainers had joined" in str(error)


def test_a_session_refused_does_not_harm_the_group() -> None:
    def body(client: Client, arena: Arena) -> FloatArray:
        take_step(client, arena)
        return arena.parameters.copy()

    with serving(2) as (server,):
        with raw_session(server.address, iter([])) as call, pytest.raises(grpc.RpcError):
            list(call)
        results = on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body))
    for result in results:
        assert result.tobytes() == expected_after(1, 2, make_arena(0)).tobytes()


def test_an_oversize_join_is_refused_and_training_goes_on() -> None:
    def body(client: Client, arena: Arena) -> FloatArray:
        take_step(client, arena)
        if client.rank == 0:
            with pytest.raises(ProtocolError, match="resource_exhausted"):
                send_oversize_join(server.address)
        take_step(client, arena)
        return arena.parameters.copy()

    with serving(2) as (server,):
        results = on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body))
    for result in results:
        assert result.tobytes() == expected_after(2, 2, make_arena(0)).tobytes()


def send_oversize_join(address: str) -> None:
    with member_channel(address, [("grpc.max_send_message_length", -1)]) as channel:
        call = channel.unary_unary(JOIN)
        try:
            call(bytes(5 << 20), timeout=DEADLINE_S)
        except grpc.RpcError as exc:
            raise rpc.translate(exc, address, "testing") from exc


def test_an_oversize_message_of_a_trainer_ends_its_session_and_names_it() -> None:
    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 1:
            chunk = Chunk(step=client.step, data=bytes(5 << 20))
            client._servers.sessions[0].send([TrainerMessage(gradients=chunk)])
        take_step(client, arena)

    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body))
        assert isinstance(errors[1], ProtocolError), errors
        assert "resource_exhausted" in str(errors[1])
        assert_all([errors[0], failure_of(server)], PeerLost, "rank 1")


def test_a_stray_caller_does_not_harm_a_running_training() -> None:
    with serving(1) as (server,), closing(Client([server.address], 0, 1)) as client:
        arena = make_arena(0)
        client.register(arena, SGD(learning_rate=RATE))
        with pytest.raises(RendezvousError, match="rank 0 joined twice"):
            Client([server.address], 0, 1)
        take_step(client, arena)
        np.testing.assert_array_equal(arena.parameters, expected_after(1, 1, arena))


TOKEN = bytes(16)
STRAYS: dict[str, tuple[bytes, str]] = {
    "one byte": (b"\x0a", "a caller sent a message that cannot be decoded (1 bytes)"),
    "noise": (bytes(range(256)) * 9, "a caller sent a message that cannot be decoded (2,304 bytes)"),
    "nothing": (b"", "a trainer did not say hello before it sent anything else"),
    **{
        f"{message.WhichOneof('kind')} first": (
            message.SerializeToString(),
            "a trainer did not say hello before it sent anything else",
        )
        for message in (
            TrainerMessage(register=Register(rank=1)),
            TrainerMessage(commit=Commit(step=1)),
            TrainerMessage(goodbye=Goodbye(reason="I go")),
        )
    },
    **{
        f"hello of rank {hello.rank}, epoch {hello.epoch}, {len(hello.token)} bytes of token": (
            TrainerMessage(hello=hello).SerializeToString(),
            f"rank {hello.rank} came without the token that the rank was given when it joined",
        )
        for hello in (
            Hello(rank=0),
            Hello(rank=1, token=TOKEN),
            Hello(rank=1, epoch=7, token=TOKEN),
            Hello(rank=9, token=TOKEN),
            Hello(rank=(1 << 32) - 1),
        )
    },
}


def answers_to(address: str, message: bytes) -> list[ServerMessage]:
    """What a session says whose only message, of any bytes, is this one."""
    with member_channel(address) as channel:
        call = channel.stream_stream(SESSION, response_deserializer=ServerMessage.FromString)
        return list(call(iter([message]), timeout=DEADLINE_S))


@pytest.mark.parametrize("what", STRAYS)
def test_who_has_no_seat_ends_his_own_session_and_nothing_else(what: str) -> None:
    message, text = STRAYS[what]

    def body(client: Client, arena: Arena) -> FloatArray:
        take_step(client, arena)
        if client.rank == 0:
            (answer,) = answers_to(server.address, message)
            assert (answer.failure.kind, answer.failure.message) == ("ProtocolError", text)
        take_step(client, arena)
        return arena.parameters.copy()

    with serving(2) as (server,):
        results = on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body))
        server.wait()
    for result in results:
        assert result.tobytes() == expected_after(2, 2, make_arena(0)).tobytes()


def test_who_has_no_seat_takes_none_before_its_trainer_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between joining and saying hello."""
    asked = []

    def late(servers: Sequence[str], index: int, channels: ExitStack, **of: Any) -> Joined:
        found = join(servers, index, channels, **of)
        asked.extend(answers_to(servers[index], STRAYS["hello of rank 1, epoch 0, 16 bytes of token"][0]))
        return found

    monkeypatch.setattr("ps.client.client.join", late)
    with serving(2) as (server,):
        results = on_threads(2, lambda rank: as_trainer([server.address], rank, 2, lambda client, _: client.rank))
        server.wait()
    assert results == [0, 1]
    assert [answer.failure.kind for answer in asked] == ["ProtocolError"] * 2


def test_what_a_trainer_sends_and_nobody_can_decode_fails_all_by_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 1:
            client._servers.sessions[0].send([b"\x0a"])  # type: ignore[list-item]
        take_step(client, arena)

    parts = "ps.client.session.parts_of"
    monkeypatch.setattr(parts, lambda each: (each,) if isinstance(each, bytes) else parts_of(each))
    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body))
        text = "rank 1 sent a message that cannot be decoded (1 bytes)"
        assert_all([*errors, failure_of(server)], ProtocolError, text)


def test_a_server_closes_after_messages_that_nobody_can_decode() -> None:
    """It waited for ever in a third of such trials."""
    for _ in range(25):
        with ExitStack() as stack:
            (server,) = stack.enter_context(serving(1))
            with Client([server.address], 0, 1):
                for _ in range(4):
                    assert answers_to(server.address, b"\x0a")
            server.wait()
            closing_time = threading.Thread(target=stack.pop_all().close, daemon=True)
            closing_time.start()
            closing_time.join(DEADLINE_S)
            assert not closing_time.is_alive(), "it does not end"
