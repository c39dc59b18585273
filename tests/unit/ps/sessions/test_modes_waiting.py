"""Who waits for whom under ssp, async and geo, and who is named when nobody comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from common.errors import PeerLost, PeerStalled
from common.tensors.arena import Arena
from common.tensors.optimizers import SGD
from ps.client.client import Client
from ps.coordinator.servicer import ParameterServer
from ps.store.modes import ASYNC, Mode
from ps.synchronizer import synchronizer_for
from tests.support.relaxed_sessions import GEO, SSP, geo_layout, relaxed
from tests.support.sessions import addresses, assert_all, errors_of, failure_of, make_arena, serving, take_step


def two(mode: Mode, body: Callable[[Client, Arena], Any], server: ParameterServer) -> list[BaseException | None]:
    def on_rank(rank: int) -> None:
        with Client([server.address], rank, 2, timeout=server._timeout, mode=mode) as client:
            arena = make_arena(rank)
            client.register(arena, SGD())
            body(client, arena)

    return errors_of(2, on_rank)


def test_ssp_lets_a_trainer_run_ahead_of_a_slow_one_by_the_bound(wait_until: Callable[..., None]) -> None:
    done: list[int] = []

    def body(client: Client, arena: Arena) -> None:
        if client.rank == 1:
            wait_until(lambda: [trainer.waiting for trainer in server.status().trainers] == [True, False])
            assert done == [0, 1]
            assert [trainer.steps for trainer in server.status().trainers] == [3, 0]
            take_step(client, arena)
            wait_until(lambda: done[2:] == [2])
        for step in range(client.step, 5):
            take_step(client, arena)
            if client.rank == 0:
                done.append(step)

    with serving(2) as (server,):
        assert two(SSP, body, server) == [None, None]
    assert done == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("mode", [ASYNC, GEO], ids=str)
def test_async_and_geo_never_wait_and_may_finish_early(mode: Mode) -> None:
    gone = threading.Event()

    def body(client: Client, arena: Arena) -> None:
        if client.rank == 1:
            assert gone.wait(20)
        for _ in range(20 if client.rank == 0 else 3):
            take_step(client, arena)
        if client.rank == 0:
            client.close()
            gone.set()

    with serving(2) as (server,):
        assert two(mode, body, server) == [None, None]
        server.wait()
        assert server.steps == 3


def test_under_ssp_who_has_fewer_steps_is_named() -> None:
    def body(client: Client, arena: Arena) -> None:
        for _ in range(9 - 4 * client.rank):
            take_step(client, arena)

    with serving(2) as (server,):
        errors = two(SSP, body, server)
        assert errors[1] is None
        assert_all([errors[0], failure_of(server)], PeerLost, "rank 1 finished at step 5 while others go on")


def test_under_ssp_who_has_made_all_its_steps_may_leave_while_others_wait(wait_until: Callable[..., None]) -> None:
    """Rank 0 leaves while rank 1 waits for rank 2, not for it."""

    def on_rank(rank: int) -> None:
        with Client([server.address], rank, 3, mode=Mode("ssp", 1)) as client:
            arena = make_arena(rank)
            client.register(arena, SGD())
            for step in range(2):
                if (rank, step) == (2, 1):
                    wait_until(lambda: [trainer.steps for trainer in server.status().trainers] == [2, 2, 1])
                    wait_until(lambda: server.status().trainers[0].left)
                take_step(client, arena)

    with serving(3) as (server,):
        assert errors_of(3, on_rank) == [None] * 3
        server.wait()


@relaxed
@pytest.mark.parametrize("servers", [1, 2])
def test_a_trainer_that_vanishes_is_named_to_all_at_once(mode: Mode, servers: int) -> None:
    vanished: list[float] = []
    heard: list[float] = []

    def body(rank: int) -> None:
        with Client(addresses(group), rank, 3, mode=mode) as client:
            arena = make_arena(rank)
            client.register(arena, SGD())
            take_step(client, arena)
            client.all_gather(np.zeros(1))
            if rank == 1:
                vanished.append(time.monotonic())
                for session in client._servers.sessions:
                    session._call.cancel()  # what the kernel does to a dead process's connections
            try:
                client._servers.wait(lambda session: False, "watching")
            finally:
                heard.append(time.monotonic())

    with serving(3, servers) as group:
        errors = errors_of(3, body)
        survivors = [errors[0], errors[2], *map(failure_of, group)]
        assert_all(survivors, PeerLost, "rank 1 died at step 1: its connection closed without a goodbye")
    assert max(heard) - vanished[0] < 1.0


def test_geo_notices_at_its_next_step_however_long_it_trains_alone() -> None:
    def body(rank: int) -> None:
        client = Client([server.address], rank, 2, mode=Mode("geo", 10**9))
        with synchronizer_for(client) as synchronizer:
            arena = Arena(geo_layout(), empty=synchronizer.empty)
            synchronizer.attach(arena, SGD())
            if rank == 1:
                client._servers.sessions[0]._call.cancel()
                return
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                synchronizer.finish(0.0)

    with serving(2) as (server,):
        errors = errors_of(2, body)
        assert_all([errors[0]], PeerLost, "rank 1 died at step 0")


def test_under_ssp_who_is_late_is_named() -> None:
    stop = threading.Event()

    def body(client: Client, arena: Arena) -> None:
        if client.rank == 1:
            assert stop.wait(20)
        try:
            for _ in range(4):
                take_step(client, arena)
        finally:
            stop.set()

    with serving(2, timeout=0.5) as (server,):
        errors = two(Mode("ssp", 1), body, server)
        text = "rank 1 did not take part in step 0 for 0.5 s"
        assert_all([*errors, failure_of(server)], PeerStalled, text)


@pytest.mark.parametrize("mode", [ASYNC, pytest.param(GEO, marks=pytest.mark.long)], ids=str)
def test_who_is_done_waits_for_the_slow_as_long_as_they_train(mode: Mode) -> None:
    """Longer than the limit of a wait; a trainer that no longer does is named."""
    stop = threading.Event()

    def body(client: Client, arena: Arena) -> None:
        for _ in range(30 if client.rank == 1 else 1):
            stop.wait(0.1 * client.rank)
            take_step(client, arena)
        if client.rank == 1:
            assert stop.wait(20)
        try:
            client.all_gather(np.zeros(1))
        finally:
            stop.set()

    with serving(2, timeout=0.5) as (server,):
        errors = two(mode, body, server)
        assert_all([*errors, failure_of(server)], PeerStalled, "rank 1 did not take part in step 1 for 0.5 s")
