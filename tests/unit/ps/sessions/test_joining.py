"""A group that does not come together, and trainers that disagree: every side hears why."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import grpc
import pytest

from common import __version__
from common.errors import (
    GradSyncError,
    LayoutMismatch,
    PeerLost,
    PeerUnreachable,
    PortInUse,
    RendezvousError,
    UsageError,
    VersionMismatch,
)
from common.network import rpc
from common.network.gradsync_pb2 import JoinReply, JoinRequest
from common.tensors.arena import Arena
from common.tensors.buckets import Bucket
from common.tensors.optimizers import SGD, Adam
from ps.client.client import Client
from ps.client.joining import Joined, join
from ps.coordinator.coordinator import Coordinator
from ps.coordinator.servicer import ParameterServer
from ps.planes.methods import JOIN, SERVICE
from tests.support.sessions import (
    DEADLINE_S,
    addresses,
    as_trainer,
    assert_all,
    errors_of,
    failure_of,
    make_arena,
    outcomes_within,
    serving,
    take_step,
)

# ---- the group does not come together ---------------------------------------------------------------------------


def join_raw(address: str, **fields: Any) -> JoinReply:
    """A join such as another version of this program might send."""
    settings = {"version": __version__, "rank": 0, "nranks": 2, "backend": "grpc", **fields}
    with rpc.connect(address, timeout=DEADLINE_S) as channel:
        call = channel.unary_unary(
            JOIN, request_serializer=JoinRequest.SerializeToString, response_deserializer=JoinReply.FromString
        )
        try:
            return call(JoinRequest(**settings), timeout=DEADLINE_S)
        except grpc.RpcError as exc:
            raise rpc.translate(exc, address, "joining") from exc


def test_servers_in_another_order_are_refused() -> None:
    with serving(1, 2) as group, pytest.raises(UsageError) as caught:
        Client(addresses(group)[::-1], 0, 1)
    assert f"server 0 at {group[1].address} is shard 1/2, but number 0 of 2 listed" in str(caught.value)


def test_a_server_left_out_is_noticed() -> None:
    with serving(1, 2) as group, pytest.raises(UsageError, match="is shard 0/2, but number 0 of 1 listed"):
        Client(addresses(group)[:1], 0, 1)


def test_disagreement_about_nranks_fails_all() -> None:
    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: Client([server.address], rank, 2 + rank))
        text = "rank 1 was started with nranks 3, the group with 2"
        assert_all([*errors, failure_of(server)], RendezvousError, text)


def test_a_rank_given_twice_fails_all() -> None:
    with serving(3) as (server,):
        errors = errors_of(3, lambda number: Client([server.address], max(number, 1), 3))
        assert_all([*errors, failure_of(server)], RendezvousError, "rank 1 joined twice")


def test_a_missing_rank_is_named_to_all() -> None:
    with serving(3, timeout=2.0) as (server,):
        errors = errors_of(2, lambda rank: Client([server.address], rank, 3))
        text = "2 of 3 ranks joined within 2 s; missing: rank 2"
        assert_all([*errors, failure_of(server)], RendezvousError, text)


def test_two_versions_fail_all_naming_both() -> None:
    def join(rank: int) -> object:
        address = server.address
        return join_raw(address, rank=1, version="9.9.9") if rank else Client([address], 0, 2)

    with serving(2) as (server,):
        errors = [*errors_of(2, join), failure_of(server)]
        assert_all(errors, VersionMismatch, f"rank 1 runs GradSync 9.9.9, this group {__version__}")


def test_a_rank_outside_is_a_usage_error_before_any_call() -> None:
    with pytest.raises(UsageError, match=r"rank 2 is outside 0\.\.1"):
        Client(["127.0.0.1:1"], 2, 2)


def test_nobody_at_the_address_is_named_within_the_limit() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(PeerUnreachable, match=rf"nobody answered at {address} within 0\.3 s"):
            Client([address], 0, 1, timeout=0.3)
        assert 0.25 < time.monotonic() - begin < 5.0


def test_a_port_in_use_is_named() -> None:
    with serving(1) as (server,), pytest.raises(PortInUse, match=server.address):
        rpc.serve(server.address, SERVICE, {}, threads=1)


def test_a_port_in_use_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Coordinator] = []

    def recorded(*args: Any, **options: Any) -> Coordinator:
        groups.append(Coordinator(*args, **options))
        return groups[-1]

    with serving(1) as (server,):
        monkeypatch.setattr("ps.coordinator.groups.Coordinator", recorded)
        with pytest.raises(PortInUse):
            ParameterServer(server.address, 1)
    try:
        assert not any(group.silence.thread.is_alive() and group.failure is None for group in groups)
    finally:
        for group in groups:
            group.fail(PeerLost("end of test"))


# ---- trainers disagree ------------------------------------------------------------------------------------------


def register_other_model(servers: Sequence[str], rank: int) -> None:
    arena = make_arena(rank, [("w", (4 + rank,))])
    client = Client(servers, rank, 2)
    try:
        client.register(arena, SGD())
    except GradSyncError as exc:
        client.close(f"{type(exc).__name__}: {exc}")
        raise


def test_another_model_fails_all() -> None:
    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: register_other_model([server.address], rank))
        assert_all([*errors, failure_of(server)], LayoutMismatch, "disagree: parameter w [")


def test_another_model_fails_all_servers() -> None:
    with serving(2, 2) as group:
        errors = errors_of(2, lambda rank: register_other_model(addresses(group), rank))
        everyone = [*errors, *map(failure_of, group)]
    assert any(isinstance(error, LayoutMismatch) for error in errors)
    assert all(isinstance(error, LayoutMismatch | PeerLost) for error in everyone)  # or that one left for it
    assert all("disagree: parameter w [" in str(error) for error in everyone)


def test_another_optimizer_fails_all() -> None:
    def body(rank: int) -> None:
        with closing(Client([server.address], rank, 2)) as client:
            client.register(make_arena(rank), [SGD(), Adam()][rank])

    with serving(2) as (server,):
        assert_all([*errors_of(2, body), failure_of(server)], LayoutMismatch, "Adam(")


def test_another_learning_rate_fails_all() -> None:
    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena, rate=[0.1, 0.2][client.rank])

    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body))
        assert_all([*errors, failure_of(server)], LayoutMismatch, "learning rate 0.")


def test_the_plan_of_these_tests_has_buckets_across_shards() -> None:
    assert make_arena(0).buckets[-1] == Bucket(0, 80)


def test_who_dies_between_joining_and_its_first_message_is_missed_at_once() -> None:
    def body(rank: int) -> None:
        if rank == 0:
            with closing(Client([server.address], 0, 2)) as client:
                client.register(make_arena(0), SGD())
        with ExitStack() as channels:  # whose end closes the connection, as the kernel does
            join([server.address], 0, channels, rank=1, nranks=2, epoch=0, timeout=DEADLINE_S)

    with serving(2, timeout=DEADLINE_S) as (server,):
        begun = time.monotonic()
        survivor, _ = errors_of(2, body)
        text = "rank 1 died at step 0: its connection closed without a goodbye"
        assert_all([survivor, failure_of(server)], PeerLost, text)
        assert time.monotonic() - begun < DEADLINE_S / 2


def test_who_says_hello_when_the_server_has_ended_because_of_another_hears_of_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(servers: Sequence[str], index: int, channels: ExitStack, **of: Any) -> Joined:
        found = join(servers, index, channels, **of)
        failure_of(server)
        server.close()
        return found

    def body(rank: int) -> None:
        if rank == 0:
            with closing(Client([server.address], 0, 2)) as client:
                client.register(make_arena(0), SGD())
        with ExitStack() as channels:
            join([server.address], 0, channels, rank=1, nranks=2, epoch=0, timeout=DEADLINE_S)

    monkeypatch.setattr("ps.client.client.join", late)
    with serving(2) as (server,):
        assert_all(errors_of(2, body)[:1], PeerLost, "rank 1 died at step 0: its connection closed without a goodbye")


def test_who_is_slow_between_joining_and_its_first_message_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the time has run out in which it was to join."""
    monkeypatch.setattr("ps.client.joining.GRACE", 1.0 - DEADLINE_S)  # its call ends after a second

    def late(servers: Sequence[str], index: int, channels: ExitStack, **of: Any) -> Joined:
        found = join(servers, index, channels, **{**of, "timeout": DEADLINE_S})
        if found.seat == 1:
            with pytest.raises(grpc.RpcError):
                list(found.call)
            assert found.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return found

    monkeypatch.setattr("ps.client.client.join", late)
    with serving(2) as (server,):
        assert errors_of(2, lambda rank: as_trainer([server.address], rank, 2, take_step)) == [None, None]
        server.wait()


def test_servers_in_another_order_leave_no_server_waiting() -> None:
    with serving(1, 2) as group:
        with pytest.raises(UsageError, match="list all servers in the order"):
            Client(addresses(group)[::-1], 0, 1)
        with pytest.raises(UsageError, match="list all servers in the order"):
            Client([group[0].address], 0, 1)


def test_a_server_that_cannot_be_reached_frees_the_other() -> None:
    with serving(1, 2) as group:
        with pytest.raises(PeerUnreachable):
            Client([group[0].address, "127.0.0.1:9"], 0, 1, timeout=0.5)
        (outcome,) = outcomes_within(5.0, group[0].wait)
        assert isinstance(outcome, PeerLost)
        assert "rank 0 left at step 0 with PeerUnreachable: nobody answered at 127.0.0.1:9" in str(outcome)
