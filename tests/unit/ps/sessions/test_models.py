"""Further models of one group at its servers: who may ask for them, what they cost, and how they end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from common import __version__
from common.errors import LayoutMismatch, PeerLost, PeerStalled, ProtocolError, UsageError
from common.network import rpc
from common.network.gradsync_pb2 import Gather, JoinReply, JoinRequest, TrainerMessage
from common.system.memory import SegmentPool
from common.tensors.arena import Arena
from common.tensors.optimizers import SGD
from ps.client.client import Client
from ps.coordinator import groups
from ps.coordinator.coordinator import Coordinator
from ps.coordinator.servicer import ParameterServer
from ps.planes.methods import JOIN
from tests.support.channels import member_channel
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
    make_arena,
    serving,
    take_step,
)

OTHER = [("c", (11, 3)), ("d", (5,))]


def attached(client: Client, shapes: list[tuple[str, tuple[int, ...]]] = OTHER) -> Arena:
    arena = make_arena(client.rank, shapes, empty=client.empty)
    client.register(arena, SGD(learning_rate=RATE))
    return arena


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.005)


def join_raw(address: str, **settings: Any) -> JoinReply:
    with member_channel(address) as channel:
        call = channel.unary_unary(
            JOIN, request_serializer=JoinRequest.SerializeToString, response_deserializer=JoinReply.FromString
        )
        try:
            return call(JoinRequest(version=__version__, nranks=1, backend="grpc", **settings), timeout=DEADLINE_S)
        except grpc.RpcError as exc:
            raise rpc.translate(exc, address, "joining") from exc


@pytest.mark.parametrize("plane", ["shm", "tcp", pytest.param("grpc", marks=pytest.mark.long)])
def test_every_plane_serves_each_model_and_what_they_had_is_given_back(
    plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[SegmentPool] = []
    close = SegmentPool.close
    monkeypatch.setattr(SegmentPool, "close", lambda pool: (closed.append(pool), close(pool)))
    counted = []

    def body(client: Client, arena: Arena) -> None:
        for _ in range(3):
            further = client.another()
            other = attached(further)
            assert further.data_plane == client.data_plane == plane
            for _ in range(2):
                take_step(further, other)
                np.testing.assert_array_equal(other.parameters, expected_after(further.step, 2, other))
                take_step(client, arena)
            counted.append(server.status().models)
            client.all_gather(np.zeros(1))
            further.close()
        np.testing.assert_array_equal(arena.parameters, expected_after(6, 2, arena))
        until(lambda: server.status().models == 1, "the models to be dropped")
        until(lambda: sum(pool in closed for pool in pools) == 3, "their memory to be given back")
        client.all_gather(np.zeros(1))

    pools: list[SegmentPool] = []

    class Noted(SegmentPool):
        def __init__(self) -> None:
            super().__init__()
            pools.append(self)

    monkeypatch.setattr(groups, "SegmentPool", Noted)
    with serving(2) as (server,):
        on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body, data_plane=plane))
        server.wait()
    assert counted == [2] * 6


@pytest.mark.parametrize("plane", ["shm", "tcp", "grpc"])
def test_a_trainer_holds_no_array_of_a_model_that_has_ended(plane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it left to Python's search for cycles, which may be far away."""
    monkeypatch.setattr(gc, "collect", lambda: 0)  # also the server's
    gc.disable()
    try:
        with serving(1) as (server,), Client([server.address], 0, 1, data_plane=plane) as client:
            further = client.another()
            arena = attached(further)
            take_step(further, arena)
            of_server = server._groups._further[1].coordinator._registration.store
            held = [weakref.ref(each) for each in (further, arena, arena.parameters, arena.gradients, of_server)]
            further.close()
            del further, arena, of_server
            until(lambda: not any(each() is not None for each in held), "them to go")
    finally:
        gc.enable()


def test_who_has_no_seat_gets_no_model() -> None:
    def body(client: Client, arena: Arena) -> None:
        for settings in ({"model": 1}, {"model": 1, "seat": bytes(16)}, {"model": 1, "rank": 7, "seat": bytes(16)}):
            with pytest.raises(ProtocolError, match=r"rank \d joined for model 1 without the token it was given for"):
                join_raw(server.address, **settings)
        token = client._servers.sessions[0].joined.token
        with pytest.raises(ProtocolError, match="rank 0 joined for model 2, but the next one is 1"):
            join_raw(server.address, model=2, seat=token)
        assert server.status().models == 1
        take_step(client, arena)

    with serving(1) as (server,):
        as_trainer([server.address], 0, 1, body)
        server.wait()


@pytest.mark.long
def test_there_are_not_too_many_at_a_time_and_any_number_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MOST_MODELS", 3)

    def body(client: Client, arena: Arena) -> None:
        further = [client.another(), client.another()]
        for _ in range(3):
            further.pop(0).close()
            until(lambda: server.status().models == 2, "a model to be dropped")
            further.append(client.another())
        with pytest.raises(UsageError, match="at most 3 models at a time; close one"):
            client.another()
        take_step(client, arena)

    with serving(1) as (server,):
        as_trainer([server.address], 0, 1, body)
        server.wait()


@pytest.mark.long
def test_many_models_at_a_time_find_threads_enough() -> None:
    """More than a server had threads for sessions of one model; all of them step."""

    def body(client: Client, arena: Arena) -> None:
        pairs = [(client, arena)]
        for _ in range(12):
            further = client.another()
            pairs.append((further, attached(further)))
        for each, own in pairs * 2:
            take_step(each, own)
        for _, own in pairs:
            np.testing.assert_array_equal(own.parameters, expected_after(2, 2, own))

    with serving(2) as (server,):
        on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body))
        server.wait()


@pytest.mark.parametrize("model", [0, 1])
def test_what_fails_one_model_fails_all_by_the_same_error(model: int) -> None:
    """Rank 1 takes a step at another learning rate than the others, who wait in another model."""

    def body(client: Client, arena: Arena) -> None:
        further = client.another()
        pairs = [(client, arena), (further, attached(further))]
        if client.rank == 0:
            take_step(*pairs[1 - model])
        take_step(*pairs[model], rate=[1.0, 0.5, 1.0][client.rank])

    with serving(3) as (server,):
        errors = errors_of(3, lambda rank: as_trainer([server.address], rank, 3, body))
        assert_all([*errors, failure_of(server)], LayoutMismatch, "learning rate")


def test_what_fails_a_model_at_one_server_fails_it_at_all() -> None:
    """Rank 1 gathers out of turn in the second model, which only the first server sees."""

    def body(client: Client, arena: Arena) -> None:
        further = client.another()
        other = attached(further)
        if client.rank == 1:
            further._servers.sessions[0].send([TrainerMessage(gather=Gather(sequence=5))])
        take_step(client, arena)
        take_step(further, other)
        take_step(further, other)

    with serving(2, 2) as group:
        errors = errors_of(2, lambda rank: as_trainer(addresses(group), rank, 2, body))
        everyone = [*errors, *map(failure_of, group)]
        assert_all(everyone, ProtocolError, "rank 1 called gather number 5 out of turn")


@pytest.mark.parametrize("first", ["leaves", "comes"])
def test_who_leaves_is_missed_in_a_model_that_he_never_came_to(first: str) -> None:
    def body(client: Client, arena: Arena) -> None:
        if client.rank == 1:
            if first == "leaves":
                until(lambda: server._groups.first.coordinator.gone, "the other one to leave")
            attached(client.another())
        elif first == "comes":
            further = server._groups._further
            until(lambda: 1 in further and further[1].coordinator.silence.somebody_waits, "the other one to wait")

    with serving(2) as (server,):
        first, second = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body))
        assert first is None
        assert_all([second, failure_of(server)], PeerLost, "rank 0 finished at step 0 while others go on")


def test_a_model_may_come_later_on_one_rank_than_the_timeout_allows() -> None:
    """It lives: whom model 1 waits for is asked in the session of model 0."""
    came = threading.Event()

    def body(client: Client, arena: Arena) -> None:
        if client.rank == 0:
            came.wait(DEADLINE_S)
        further = client.another()
        take_step(further, attached(further))

    with ParameterServer("127.0.0.1:0", 2, timeout=0.5) as server:
        timer = threading.Timer(1.5, came.set)
        timer.start()
        on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body))
        server.wait()


def test_who_never_comes_to_a_model_is_named_at_the_limit() -> None:
    def body(client: Client, arena: Arena) -> None:
        if client.rank == 0:
            until(lambda: client._servers.error, "the other one to give up")
            client.check()
        else:
            attached(client.another())

    with serving(2, timeout=0.5) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body))
        assert_all([*errors, failure_of(server)], PeerStalled, "rank 0 did not take part in step 0 for 0.5 s; it is")


def test_a_server_that_is_told_to_stop_ends_no_models_step_halfway() -> None:
    """It is told so within a step of the second one."""
    pushed = threading.Event()

    def body(client: Client, arena: Arena) -> None:
        further = client.another()
        other, second = attached(further), server._groups._further[1].coordinator
        if client.rank == 1:
            pushed.wait(DEADLINE_S)
            until(second._registration.store_for(1).within_step, "the step to begin")
            threading.Thread(target=server.stop, args=("was told to stop",), daemon=True).start()
            until(lambda: second._stepping._stop, "it to be told")
        pushed.set()
        seconds.append(second)
        for _ in range(100):
            take_step(further, other)
            take_step(client, arena)

    seconds: list[Coordinator] = []
    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body))
        assert_all([*errors, failure_of(server)], PeerLost, "was told to stop")
    assert [second.steps for second in seconds] == [1, 1]


@pytest.mark.long
def test_clients_of_further_models_end_with_the_first_one() -> None:
    with serving(1, 2) as group, Client(addresses(group), 0, 1) as client:
        further = client.another().another()
        attached(further)
        client.close()
        assert client._further == []
        assert further._servers.sessions == []
        for server in group:
            server.wait()
