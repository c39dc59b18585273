"""Steps told through shared memory, and steps committed ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from common.errors import PeerLost, PeerStalled
from common.network.gradsync_pb2 import TrainerMessage
from common.system.memory import aligned_empty
from common.tensors.arena import Arena, FloatArray
from common.tensors.optimizers import SGD
from ps.client.client import Client
from ps.planes.mailboxes import NOTE_BYTES
from ps.planes.shm_trainer import SharedMemoryTrainerPlane
from tests.support.groups import assert_same_bits, on_threads, sample
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
    planes,
    serving,
    take_step,
)

between_hosts = pytest.mark.parametrize("plane", ["tcp", "grpc"])

# ---- notes through shared memory --------------------------------------------------------------------------------


def overhear(client: Client) -> list[str]:
    """What is sent to the first server from now on, in order: its kind, "note " before it if through shared memory."""
    session, said = client._servers.sessions[0], []
    plane = session.plane
    assert isinstance(plane, SharedMemoryTrainerPlane)
    post, to_server = session.post, plane.to_server

    class ToServer:
        def put(self, note: bytes) -> bool:
            said.append(f"note {TrainerMessage.FromString(note).WhichOneof('kind')}")
            return to_server.put(note)

    def overheard(messages: Iterable[Any]) -> None:
        whole = list(messages)
        said.extend(message.WhichOneof("kind") for message in whole)
        post(whole)

    plane.to_server, session.post = ToServer(), overheard  # type: ignore[assignment, method-assign]
    return said


def test_steps_are_told_through_shared_memory_but_nothing_overtakes_what_went_over_grpc() -> None:
    step = ["gradients"] * 3 + ["commit"]

    def body(client: Client, arena: Arena) -> None:
        said = overhear(client)
        take_step(client, arena)
        take_step(client, arena)
        noted = ["note gradients_at", *(f"note {kind}" for kind in step * 2)]
        assert said == noted
        client._servers.sessions[0].send([])  # not answered
        take_step(client, arena)
        assert said[len(noted) :] == step
        client.all_gather(np.zeros(1))  # answered
        take_step(client, arena)
        assert said[len(noted) + len(step) :] == ["gather", *(f"note {kind}" for kind in step)]

    with serving(2) as (server,):
        assert errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body)) == [None, None]


def test_notes_that_find_no_room_go_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mailbox has one place here; and a mask of used parameters may be too long for any."""
    monkeypatch.setattr("ps.planes.mailboxes.SLOTS", 1)
    seen = []

    def body(client: Client, arena: Arena) -> None:
        for step in range(20):
            arena.gradients[...] = sample(client.rank, arena.layout.length, "float32", seed=client.step)
            for bucket in range(len(arena.buckets)):
                client.push(bucket)
            client.commit(RATE, used=bytes(NOTE_BYTES if step % 2 else 4))
        seen.append(arena.parameters.copy())

    with serving(2) as (server,):
        assert errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body)) == [None, None]
    for parameters_seen in seen:
        assert_same_bits(parameters_seen, expected_after(20, 2, make_arena(0)))


# ---- committed ahead --------------------------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.store.make.PIECE", 32)


@planes
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.usefixtures("_small_pieces")
def test_steps_committed_ahead_give_numpys_bits(servers: int, planes: Sequence[tuple[str, bool]]) -> None:
    """By all, by some, or by nobody, whatever their data planes."""

    def body(rank: int) -> list[FloatArray]:
        plane, shared = planes[rank]
        with Client(addresses(group), rank, 3, data_plane=plane) as client:
            arena = make_arena(rank, empty=client.empty if shared else aligned_empty)
            client.register(arena, SGD())
            seen = []
            for step in range(4):
                if step != rank:
                    client.commit_ahead(RATE)
                take_step(client, arena)
                seen.append(arena.parameters.copy())
        return seen

    with serving(3, servers) as group:
        seen = on_threads(3, body)
    for step in range(4):
        for rank in range(3):
            assert_same_bits(seen[rank][step], expected_after(step + 1, 3, make_arena(0)))


@pytest.mark.usefixtures("_small_pieces")
@between_hosts
def test_parameters_come_back_before_the_rest_is_pushed_unless_they_are_held(plane: str) -> None:
    hold = {0: False, 1: True}
    looked = threading.Barrier(2, timeout=DEADLINE_S)

    def body(client: Client, arena: Arena) -> tuple[FloatArray, FloatArray]:
        before = arena.parameters.copy()
        arena.gradients[...] = sample(client.rank, arena.layout.length, "float32", seed=0)
        client.commit_ahead(RATE, hold=hold[client.rank])
        client.push(0)
        where = arena.buckets[0]
        if client.rank == 0:
            new = expected_after(1, 2, make_arena(0))[where.start : where.stop]
            until(lambda: bool((arena.parameters[where.start : where.stop] == new).all()))
        looked.wait()
        seen = arena.parameters.copy()
        changed = seen != before
        assert changed.any() != hold[client.rank]
        assert not changed[: where.start].any()
        for bucket in range(1, len(arena.buckets)):
            client.push(bucket)
        client.commit(RATE)
        return seen, arena.parameters.copy()

    with serving(2) as (server,):
        results = on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body, data_plane=plane))
    for _, after in results:
        assert_same_bits(after, expected_after(1, 2, make_arena(0)))


@pytest.mark.parametrize("end", [lambda client: client.commit(2 * RATE), lambda client: client.average()])
@between_hosts
def test_a_step_committed_ahead_cannot_end_in_another_way(plane: str, end: Callable[[Client], None]) -> None:
    def body(client: Client, arena: Arena) -> None:
        client.commit_ahead(RATE)
        for bucket in range(len(arena.buckets)):
            client.push(bucket)
        text = "^step 0 was committed ahead as an update at learning rate 0.05; it cannot end in another way$"
        with pytest.raises(ValueError, match=text):
            end(client)
        client.commit(RATE)

    with serving(1) as (server,):
        as_trainer([server.address], 0, 1, body, data_plane=plane)


def test_nothing_is_committed_ahead_through_shared_memory_where_parameters_are_to_be_held() -> None:
    """They may be the server's own, which it writes to."""

    def body(client: Client, arena: Arena) -> None:
        client.commit_ahead(2 * RATE, hold=True)
        take_step(client, arena)
        assert_same_bits(arena.parameters, expected_after(1, 1, make_arena(0)))

    with serving(1) as (server,):
        as_trainer([server.address], 0, 1, body, data_plane="shm")


@between_hosts
def test_who_vanishes_after_committing_ahead_is_named_within_a_second(plane: str) -> None:
    """While the others still push, or hold what is served."""
    vanished: list[float] = []

    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        client.commit_ahead(RATE, hold=client.rank == 0)
        client.push(0)
        if client.rank == 1:
            vanished.append(time.monotonic())
            for session in client._servers.sessions:
                session._call.cancel()  # what the kernel does to a dead process's connections
            return
        try:
            take_step(client, arena, pushed=1)
        finally:
            assert time.monotonic() - vanished[0] < 1.0

    with serving(3, 2) as group:
        errors = errors_of(3, lambda rank: as_trainer(addresses(group), rank, 3, body, data_plane=plane))
        survivors = [errors[0], errors[2], *map(failure_of, group)]
        assert_all(survivors, PeerLost, "rank 1 died at step 1: its connection closed without a goodbye")


@between_hosts
def test_who_falls_silent_after_committing_ahead_is_named_within_the_limit(plane: str) -> None:
    stop = threading.Event()

    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        client.commit_ahead(RATE, hold=True)
        client.push(0)
        if client.rank == 0:
            assert stop.wait(DEADLINE_S)
        try:
            take_step(client, arena, pushed=1)
        finally:
            stop.set()

    with serving(2, timeout=0.5) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body, data_plane=plane))
        text = "rank 0 did not take part in step 1 for 0.5 s"
        assert_all([*errors, failure_of(server)], PeerStalled, text)


@pytest.mark.usefixtures("_small_pieces")
@between_hosts
def test_leaving_while_parameters_are_held_takes_no_time_and_changes_none(plane: str) -> None:
    def body(rank: int) -> bool:
        client, arena = Client([server.address], rank, 2, data_plane=plane), make_arena(rank)
        client.register(arena, SGD())
        before, heard_at = arena.parameters.copy(), client._servers.sessions[0].inbox.heard_at
        arena.gradients.fill(1)
        client.commit_ahead(RATE, hold=True)
        for bucket in range(len(arena.buckets) - 1):
            client.push(bucket)
        until(lambda: client._servers.sessions[0].inbox.heard_at > heard_at)  # what has come is held
        begin = time.monotonic()
        client.close("ValueError: boom")
        assert time.monotonic() - begin < 1.0
        return bool((arena.parameters == before).all())

    with serving(2) as (server,):
        assert on_threads(2, body) == [True, True]
