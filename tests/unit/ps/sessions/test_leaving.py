"""Trainers and servers that are lost, silent or done: named on every side."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import numpy as np
import pytest

from common.errors import GradSyncError, PeerError, PeerLost, PeerStalled
from common.network.gradsync_pb2 import Hello, TrainerMessage
from common.tensors.arena import Arena
from common.tensors.optimizers import SGD
from ps.client.client import Client
from ps.coordinator.servicer import ParameterServer
from tests.support.sessions import (
    DEADLINE_S,
    RATE,
    addresses,
    as_trainer,
    assert_all,
    errors_of,
    expected_after,
    failure_of,
    make_arena,
    outcomes_within,
    raw_session,
    serving,
    take_step,
)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_trainer_that_vanishes_is_named_to_the_others(servers: int) -> None:
    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 1:
            for session in client._servers.sessions:
                session._call.cancel()  # what the kernel does to a dead process's connections
            return
        take_step(client, arena)

    with serving(3, servers) as group:
        errors = errors_of(3, lambda rank: as_trainer(addresses(group), rank, 3, body))
        survivors = [errors[0], errors[2], *map(failure_of, group)]
        assert_all(survivors, PeerLost, "rank 1 died at step 1: its connection closed without a goodbye")


def test_a_trainer_that_raises_is_named_with_its_reason() -> None:
    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 2:
            raise ValueError("bad pixel")
        take_step(client, arena)

    with serving(3, 2) as group:
        errors = errors_of(3, lambda rank: as_trainer(addresses(group), rank, 3, body))
        assert isinstance(errors[2], ValueError)
        survivors = [errors[0], errors[1], *map(failure_of, group)]
        assert_all(survivors, PeerLost, "rank 2 left at step 1 with ValueError: bad pixel")


def test_a_trainer_that_has_fewer_steps_is_named() -> None:
    def body(client: Client, arena: Arena) -> None:
        for _ in range(3 - client.rank):
            take_step(client, arena)

    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body))
        assert errors[1] is None
        assert_all([errors[0], failure_of(server)], PeerLost, "rank 1 finished at step 2 while others go on")


@pytest.mark.parametrize(("servers", "trainers"), [(0.5, 30.0), (30.0, 0.5)])
def test_a_silent_trainer_is_named_to_all_within_the_limit(servers: float, trainers: float) -> None:
    """The shorter one of those that were given, wherever."""
    stop = threading.Event()

    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 0:
            assert stop.wait(DEADLINE_S)
        begin = time.monotonic()
        try:
            take_step(client, arena)
        finally:
            stop.set()
        assert time.monotonic() - begin < 5.0

    with serving(2, timeout=servers) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body, timeout=trainers))
        text = "rank 0 did not take part in step 1 for 0.5 s"
        assert_all([*errors, failure_of(server)], PeerStalled, text)


def test_the_other_servers_hear_from_trainers_who_is_frozen() -> None:
    """Server 1 itself would have waited for half a minute."""
    told = threading.Event()

    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 0:
            assert told.wait(DEADLINE_S)
        take_step(client, arena)

    def trainer_or_server(which: int) -> None:
        if which < 2:
            as_trainer(addresses(group), which, 2, body)
        try:
            group[1].wait()
        finally:
            told.set()

    with (
        ParameterServer("127.0.0.1:0", 2, shard=(0, 2), timeout=2.0, wait_limit=0.0) as first,
        ParameterServer("127.0.0.1:0", 2, shard=(1, 2), timeout=30.0) as second,
    ):
        group = [first, second]
        errors = errors_of(3, trainer_or_server)
        text = "rank 0 did not take part in step 1 for 2 s"
        assert_all([*errors[1:], failure_of(first)], PeerStalled, text)


def close_server_1_in_mid_training() -> tuple[str, list[BaseException | None]]:
    """The closed server's name, and what its two trainers and server 0 raise."""

    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 1:
            group[1].close()
        take_step(client, arena)

    with serving(2, 2) as group:
        errors = errors_of(2, lambda rank: as_trainer(addresses(group), rank, 2, body))
        return f"server 1 at {group[1].address}", [*errors, failure_of(group[0])]


def test_a_server_that_closes_in_mid_training_fails_all() -> None:
    _, errors = close_server_1_in_mid_training()
    assert all(isinstance(error, GradSyncError) for error in errors), errors
    assert isinstance(errors[-1], PeerLost)


def test_a_server_that_closes_in_mid_training_is_named() -> None:
    name, errors = close_server_1_in_mid_training()
    assert all(isinstance(error, PeerError) for error in errors), errors
    assert all(name in str(error) for error in errors[:2]), errors


def test_a_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.client.servers.GRACE", 0.0)
    stop = threading.Event()

    def body(client: Client, arena: Arena) -> None:
        if client.rank == 1:
            stop.wait(DEADLINE_S)
            return
        client._servers.timeout = 0.3  # the server itself would wait much longer
        try:
            take_step(client, arena)
        finally:
            stop.set()

    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body))
        text = f"server 0 at {server.address} did not answer within 0.3 s while waiting for the result of step 0"
        assert_all(errors[:1], PeerStalled, text)


def test_closing_twice_is_no_error() -> None:
    with serving(1) as (server,):
        client = Client([server.address], 0, 1)
        client.register(make_arena(0), SGD())
        client.close()
        client.close("a reason that comes too late")
        server.wait()


def test_closing_without_registering_is_no_error() -> None:
    with serving(1) as (server,):
        client = Client([server.address], 0, 1)
        client.close()
        client.close()


def test_a_trainer_that_leaves_before_it_registers_is_noticed() -> None:
    """It may find no data, or that another server is listed wrongly."""
    with serving(1) as (server,):
        Client([server.address], 0, 1).close("DataError: no such file")
        (outcome,) = outcomes_within(1.0, server.wait)
        assert isinstance(outcome, PeerLost)


def test_who_registers_twice_hears_why() -> None:
    arena = make_arena(0)
    with serving(1) as (server,), closing(Client([server.address], 0, 1)) as client:
        client.register(arena, SGD(learning_rate=RATE))
        hello = TrainerMessage(hello=Hello(epoch=0, rank=0, token=server._groups.first.token(0)))
        with raw_session(server.address, iter([hello])) as call:
            heard = [message.failure for message in call]
        take_step(client, arena)
        np.testing.assert_array_equal(arena.parameters, expected_after(1, 1, arena))
    assert [failure.kind for failure in heard] == ["ProtocolError"]
    assert "rank 0 came twice" in heard[0].message
