"""A trainer may wait for the front of the parameters only."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from common.network.gradsync_pb2 import Gather, Plane, Served, ServerMessage, TrainerMessage
from common.tensors.arena import Arena
from common.tensors.optimizers import SGD
from ps.client.session import Client
from tests.support.sessions import DEADLINE_S, as_trainer, lying, make_arena, parameters, serving, without_waiting


def test_who_waits_for_the_front_waits_for_no_more() -> None:
    """And whoever goes on waits for the rest first."""
    size, front_is_there = make_arena(0).layout.length, threading.Event()

    def answers(said: Iterator[TrainerMessage]) -> Iterator[ServerMessage]:
        def heard(kind: str) -> bool:
            return any(message.WhichOneof("kind") == kind for message in said)

        yield from (ServerMessage(plane=Plane(refusal="no")), parameters(0, size), served(0))
        assert heard("commit")
        yield parameters(48, size - 48, step=1)
        yield parameters(0, 16, step=1)
        assert front_is_there.wait(DEADLINE_S)
        yield parameters(16, 32, step=1)
        yield from (served(1), ServerMessage(gathered=Gather(size=1, data=b"x")))
        assert heard("commit")
        yield from (parameters(0, size, step=2), served(2))
        assert heard("goodbye")

    with lying(answers) as address, Client([address], 0, 1, data_plane="grpc", priority=True) as client:
        arena = make_arena(0)
        client.register(arena, SGD())
        arena.parameters.fill(7)
        without_waiting(client, arena)
        client.wait_for(0, 16)
        client.wait_for(64, 80)
        assert (client.step, np.flatnonzero(arena.parameters).tolist()) == (0, list(range(16, 48)))
        front_is_there.set()
        assert client.all_gather(np.zeros(1, np.uint8)).size == 1
        assert (client.step, arena.parameters.any()) == (1, False)
        without_waiting(client, arena)
    assert client.step == 2


def test_without_priority_or_over_shared_memory_a_commit_waits_for_all() -> None:
    def body(client: Client, arena: Arena) -> int:
        without_waiting(client, arena)
        return client.step

    for options in ({"data_plane": "grpc"}, {"data_plane": "shm", "priority": True}):
        with serving(1) as (server,):
            assert as_trainer([server.address], 0, 1, body, **options) == 1


def served(step: int) -> ServerMessage:
    return ServerMessage(served=Served(step=step))
