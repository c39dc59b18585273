"""Clients and servers over real gRPC in one process: the same bits as NumPy on every data plane."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import PeerLost, ProtocolError, UsageError
from common.system.handover import LABEL, Link
from common.system.memory import Segment, aligned_empty
from common.tensors.arena import Arena, FloatArray
from common.tensors.optimizers import SGD
from ps.client.client import Client
from ps.client.data_planes import DataPlanes
from ps.client.session import Session
from ps.coordinator.coordinator import Coordinator
from tests.support.groups import assert_same_bits, on_threads, reduced, sample
from tests.support.sessions import (
    DEADLINE_S,
    RATE,
    addresses,
    as_trainer,
    errors_of,
    expected_after,
    make_arena,
    planes,
    planes_with,
    serving,
    take_step,
)


@planes_with("nranks, servers", [1, 2, 3], [1, 2, 3])
def test_training_gives_numpys_bits(nranks: int, servers: int, planes: Sequence[tuple[str, bool]]) -> None:
    def body(rank: int) -> list[FloatArray]:
        plane, shared = planes[rank]
        with Client(addresses(group), rank, nranks, data_plane=plane) as client:
            arena = make_arena(rank, empty=client.empty if shared else aligned_empty)
            client.register(arena, SGD())
            assert client.data_plane == ("shm" if plane == "auto" else plane)
            seen = [arena.parameters.copy()]
            for _ in range(3):
                take_step(client, arena)
                seen.append(arena.parameters.copy())
        return seen

    with serving(nranks, servers) as group:
        seen = on_threads(nranks, body)
        for server in group:
            server.wait()
            assert server.steps == 3
    assert len(make_arena(0).buckets) == 3
    for step in range(4):
        expected = expected_after(step, nranks, make_arena(0))
        for rank in range(nranks):
            assert seen[rank][step].tobytes() == expected.tobytes()


@planes
def test_averages_arrive_whatever_the_data_plane(planes: Sequence[tuple[str, bool]]) -> None:
    def body(rank: int) -> list[FloatArray]:
        plane, shared = planes[rank]
        with Client(addresses(group), rank, 3, data_plane=plane) as client:
            arena = make_arena(rank, empty=client.empty if shared else aligned_empty)
            client.register(arena, None)
            means = [arena.parameters.copy()]
            for step in range(3):
                arena.gradients[...] = sample(rank, arena.layout.length, "float32", seed=step)
                for bucket in range(len(arena.buckets)):
                    client.push(bucket)
                client.average()
                means.append(arena.gradients.copy())
            arena.parameters.fill(rank)  # without an optimizer they are each rank's own
            client.all_gather(np.zeros(1))
            assert np.all(arena.parameters == rank)
        return means

    with serving(3, 2) as group:
        results = on_threads(3, body)
    arena = make_arena(0)
    expected = [sample(0, arena.layout.length, "float32", seed=99)]
    for step in range(3):
        gradients = [sample(rank, arena.layout.length, "float32", seed=step) for rank in range(3)]
        expected.append(np.zeros(arena.layout.length, np.float32))
        for b in arena.buckets:
            expected[-1][b.start : b.stop] = reduced([g[b.start : b.stop] for g in gradients], "mean")
    for result in results:
        for got, wanted in zip(result, expected, strict=True):
            assert_same_bits(got, wanted)


def test_parameters_from_empty_are_one_memory_until_a_trainer_leaves() -> None:
    """What one writes, all see: the server writes once for all. After `close` each has its own."""

    def body(rank: int) -> tuple[float, float, float]:
        with Client(addresses(group), rank, 3, data_plane="shm") as client:
            arena = make_arena(rank, empty=client.empty)
            client.register(arena, SGD())
            if rank == 1:
                arena.parameters[5] = 42.0
            client.all_gather(np.zeros(1))
            common = float(arena.parameters[5])
            client.all_gather(np.zeros(1))
        arena.parameters[5] = rank
        return common, float(arena.parameters[5]), float(arena.parameters[6])

    with serving(3) as group:
        results = on_threads(3, body)
    assert results == [(42.0, rank, results[0][2]) for rank in range(3)]


@pytest.mark.parametrize("servers", [1, 2])
def test_rank_0_may_leave_before_a_slow_rank_has_mapped_its_parameters(
    servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, settle = threading.Event(), DataPlanes.settle

    def slow(planes: DataPlanes, sessions: Sequence[Session], arena: Arena) -> None:
        if planes.rank:
            assert left.wait(DEADLINE_S)
        settle(planes, sessions, arena)

    monkeypatch.setattr(DataPlanes, "settle", slow)

    def body(rank: int) -> bytes:
        with Client(addresses(group), rank, 2, data_plane="shm") as client:
            arena = make_arena(rank, empty=client.empty)
            client.register(arena, SGD())
        left.set()
        return arena.parameters.tobytes()

    with serving(2, servers) as group:
        results = on_threads(2, body)
    assert results == [make_arena(0).parameters.tobytes()] * 2


def test_a_trainer_out_of_reach_goes_over_tcp_unless_it_must_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between hosts: there is no such desk."""
    monkeypatch.setattr(Coordinator, "desk", "gradsync-elsewhere")
    with serving(1) as group, Client(addresses(group), 0, 1) as client:
        arena = make_arena(0, empty=client.empty)
        client.register(arena, SGD())
        assert client.data_plane == "tcp"
        take_step(client, arena)
        assert arena.parameters.tobytes() == expected_after(1, 1, arena).tobytes()
    with serving(1) as group, Client(addresses(group), 0, 1, data_plane="shm") as client:
        with pytest.raises(UsageError) as caught:
            client.register(make_arena(0), SGD())
        assert str(caught.value) == (
            f"server 0 at {group[0].address} and rank 0 cannot share memory: they are on different hosts; "
            "use --data-plane auto, tcp or grpc"
        )


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_PATH], ids=["read-write", "path"])
def test_a_server_neither_reads_nor_writes_a_file_that_is_handed_in(
    flags: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret" * 5000)
    with serving(1) as group, Client(addresses(group), 0, 1) as client:
        arena = make_arena(0, empty=client.empty)
        os.truncate(secret, arena.parameters.nbytes)
        kept, honest = secret.read_bytes(), Link.give

        def give(link: Link, segment: Segment) -> None:
            if segment.nbytes != len(kept):
                honest(link, segment)
                return
            with socket.socket(fileno=os.dup(link._connection.fileno())) as connection:
                descriptor = os.open(secret, flags)
                socket.send_fds(connection, [LABEL.pack(segment.key, segment.nbytes)], [descriptor])
                os.close(descriptor)

        monkeypatch.setattr(Link, "give", give)
        client.register(arena, SGD())
        assert client.data_plane == "grpc"
        assert client._servers.sessions[0].inbox.terms.why_not == "what was handed over is not a memory of fixed size"
        take_step(client, arena)
        assert arena.parameters.tobytes() == expected_after(1, 1, arena).tobytes()
    assert secret.read_bytes() == kept


def test_data_planes_are_named() -> None:
    with pytest.raises(UsageError, match=r"unknown data plane 'rdma' \(known: auto, shm, tcp, grpc\)"):
        Client(["127.0.0.1:1"], 0, 1, data_plane="rdma")


@pytest.mark.parametrize("servers", [1, 2])
def test_an_arena_of_several_messages(servers: int) -> None:
    shapes = [("w", (300_000,)), ("v", (333, 1000)), ("b", (5,))]

    def body(rank: int) -> Arena:
        arena = make_arena(rank, shapes, bucket_bytes=1_000_000)
        with closing(Client(addresses(group), rank, 2)) as client:
            client.register(arena, SGD())
            for _ in range(2):
                take_step(client, arena)
        return arena

    with serving(2, servers) as group:
        arenas = on_threads(2, body)
    assert arenas[0].parameters.nbytes > 2 << 20
    expected = expected_after(2, 2, arenas[0])
    for arena in arenas:
        assert arena.parameters.tobytes() == expected.tobytes()


def test_more_servers_than_cache_lines() -> None:
    def body(rank: int) -> Arena:
        arena = make_arena(rank, [("b", (3,))])
        with closing(Client(addresses(group), rank, 2)) as client:
            client.register(arena, SGD())
            take_step(client, arena)
        return arena

    with serving(2, 3) as group:
        arenas = on_threads(2, body)
    for arena in arenas:
        assert arena.parameters.tobytes() == expected_after(1, 2, arena).tobytes()


def test_buckets_may_be_pushed_in_any_order() -> None:
    def body(client: Client, arena: Arena) -> FloatArray:
        arena.gradients[...] = sample(client.rank, arena.layout.length, "float32", seed=0)
        order = range(len(arena.buckets))
        for bucket in order if client.rank else reversed(order):
            client.push(bucket)
        client.commit(RATE)
        return arena.parameters.copy()

    with serving(2, 2) as group:
        results = on_threads(2, lambda rank: as_trainer(addresses(group), rank, 2, body))
    for result in results:
        assert result.tobytes() == expected_after(1, 2, make_arena(0)).tobytes()


@pytest.mark.parametrize("values", [np.array([1.5, -2.0]), np.zeros((0, 3)), np.arange(6).reshape(3, 2).T])
def test_all_gather_stacks_in_rank_order(values: Any) -> None:
    def body(client: Client, arena: Arena) -> Any:
        first = client.all_gather(np.asarray(values) + client.rank)
        take_step(client, arena)
        return first, client.all_gather(np.array([client.rank], np.int8))

    with serving(3, 2) as group:
        results = on_threads(3, lambda rank: as_trainer(addresses(group), rank, 3, body))
    expected = np.stack([np.asarray(values) + rank for rank in range(3)])
    for first, second in results:
        assert first.dtype == expected.dtype
        np.testing.assert_array_equal(first, expected, strict=True)
        np.testing.assert_array_equal(second, np.array([[0], [1], [2]], np.int8), strict=True)


def test_all_gather_of_scalars_gives_a_vector() -> None:
    def body(client: Client, arena: Arena) -> Any:
        return client.all_gather(np.array(client.rank))

    with serving(2) as (server,):
        results = on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body))
    np.testing.assert_array_equal(results[0], np.array([0, 1]), strict=True)


def test_all_gather_of_more_than_one_message() -> None:
    """As long trainings have it: their timelines are 48 bytes a step and rank."""

    def body(client: Client, arena: Arena) -> Any:
        return client.all_gather(sample(client.rank, 600_000, "float32"))

    with serving(2) as (server,):
        results = on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body))
    for result in results:
        np.testing.assert_array_equal(result, [sample(rank, 600_000, "float32") for rank in range(2)])


def test_all_gather_of_unequal_sizes_is_refused() -> None:
    def body(client: Client, arena: Arena) -> Any:
        return client.all_gather(np.zeros(1 + client.rank, np.int8))

    with serving(2) as group:
        errors = errors_of(2, lambda rank: as_trainer(addresses(group), rank, 2, body))
    assert {type(error) for error in errors} <= {ProtocolError, PeerLost}
    assert any("ranks gave 3 bytes together" in str(error) for error in errors)
