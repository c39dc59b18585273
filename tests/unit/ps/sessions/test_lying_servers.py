"""What a server cannot mean is an error by its name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from common.errors import GradSyncError, PeerLost, ProtocolError, UsageError
from common.network.gradsync_pb2 import Chunk, Failure, Memory, Place, Plane, Served, ServerMessage, TrainerMessage
from common.tensors.arena import FloatArray
from common.tensors.optimizers import SGD
from ps.client.client import Client
from ps.planes.shared_memory import Desk, OthersMemory
from tests.support.sessions import lying, make_arena, parameters

LIES: dict[str, tuple[list[ServerMessage], str]] = {
    "parameters beyond the shard": ([parameters(8, 9)], r"elements 8\.\.17 outside Shard\(start=0, stop=16\)"),
    "parameters of a later step": ([parameters(0, 16, step=1)], "parameters of step 1, expected 0"),
    "ragged parameters": ([ServerMessage(parameters=Chunk(data=b"abc"))], "3 bytes"),
    "nothing": ([], "ended the session without a reason"),
}


def error_of_registering(address: str) -> GradSyncError:
    arena = make_arena(0, [("w", (9,))])
    with closing(Client([address], 0, 1)) as client, pytest.raises(GradSyncError) as caught:
        client.register(arena, SGD())
    return caught.value


@pytest.mark.parametrize("name", LIES)
def test_what_a_server_cannot_mean_is_an_error(name: str) -> None:
    answers, text = LIES[name]
    arena = make_arena(0, [("w", (9,))])
    with (
        lying(answers) as address,
        closing(Client([address], 0, 1)) as client,
        pytest.raises(ProtocolError, match=text),
    ):
        client.register(arena, SGD())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("shm", "shares memory with a trainer that has offered none"),
        ("pigeons", "answered with data plane 'pigeons'"),
        ("", "answered with data plane ''"),
    ],
)
def test_a_data_plane_that_cannot_be_is_an_error(kind: str, text: str) -> None:
    def answers(messages: Iterator[TrainerMessage]) -> Iterator[ServerMessage]:
        yield ServerMessage(plane=Plane(kind=kind))
        yield ServerMessage(served=Served(step=0))
        list(messages)  # until it leaves

    arena = make_arena(0, [("w", (9,))])
    with (
        lying(answers) as address,
        closing(Client([address], 0, 1)) as client,
        pytest.raises(ProtocolError, match=text),
    ):
        client.register(arena, SGD())


def test_an_error_of_the_server_keeps_its_name() -> None:
    answers = [ServerMessage(failure=Failure(kind="StaleEpoch", message="rank 0 sent epoch 1"))]
    with lying(answers) as address:
        error = error_of_registering(address)
    assert (type(error).__name__, str(error)) == ("StaleEpoch", "rank 0 sent epoch 1")


@pytest.mark.parametrize(
    ("last", "kind", "text"),
    [
        ([ServerMessage(failure=Failure(kind="PeerLost", message="rank 1 died"))], PeerLost, "^rank 1 died$"),
        ([], UsageError, "rank 0 cannot share memory with the servers: its memory was not handed over; use"),
    ],
)
def test_of_memory_that_is_gone_the_server_says_why_if_it_has_failed(
    last: list[ServerMessage], kind: type[GradSyncError], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, ended = threading.Event(), threading.Event()
    array = OthersMemory.array

    def tell(self: OthersMemory, place: Place, count: int) -> FloatArray:
        tried.set()
        return array(self, place, count)

    def answers() -> Iterator[ServerMessage]:
        yield ServerMessage(plane=Plane(kind="shm", parameters=Place(memory=Memory(size=64))))
        yield ServerMessage(served=Served(step=0))
        assert tried.wait(5)
        yield from last
        ended.wait(5)

    monkeypatch.setattr(OthersMemory, "array", tell)
    monkeypatch.setattr("ps.client.servers.FAREWELL_S", 0.5)
    arena = make_arena(0, [("w", (9,))])
    with Desk() as desk, lying(answers(), desk=desk.name) as address, closing(Client([address], 0, 1)) as client:
        with pytest.raises(kind, match=text):
            client.register(arena, SGD())
        ended.set()
