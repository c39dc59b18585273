"""Callers that do not keep to the protocol harm nobody who does."""

from __future__ import annotations

from contextlib import closing

import grpc
import numpy as np
import pytest

from common.errors import PeerLost, ProtocolError, RendezvousError
from common.network import rpc
from common.network.gradsync_pb2 import Chunk, TrainerMessage
from common.tensors.arena import Arena, FloatArray
from common.tensors.optimizers import SGD
from ps.client.session import Client
from ps.coordinator.servicer import JOIN
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
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
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
            client._sessions[0].send([TrainerMessage(gradients=chunk)])
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
