"""When buckets are pushed, seen by a client that only takes notes."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")

from common.sync.messenger import ALONE
from common.tensors.arena import Arena
from common.tensors.optimizers import Adam, Optimizer
from ps.store.modes import SYNC
from ps.synchronizer import ServerSynchronizer
from tests.support.server_jobs import make_arena


class NotingClient:
    rank, nranks, servers, data_plane, mode, messenger = 0, 1, ("nowhere:1",), "none", SYNC, ALONE
    step = 1

    def __init__(self) -> None:
        self.notes: list[object] = []

    def register(self, arena: Arena, optimizer: Optimizer, *, commits: object = None) -> None:
        self.notes.append("register")

    def push(self, bucket: int) -> None:
        self.notes.append(bucket)

    def commit_ahead(self, learning_rate: float, *, hold: bool) -> None:
        self.notes.append(("ahead", learning_rate, hold))

    def commit(self, learning_rate: float) -> None:
        self.notes.append(("commit", learning_rate))

    def close(self, reason: str = "") -> None:
        self.notes.append(("close", reason))


def noted(*, overlap: bool) -> tuple[NotingClient, ServerSynchronizer]:
    client = NotingClient()
    synchronizer = ServerSynchronizer(client, overlap=overlap)
    synchronizer.attach(make_arena(0), Adam())
    client.notes.clear()
    return client, synchronizer


def test_buckets_are_pushed_as_soon_as_all_before_them_are_final() -> None:
    client, synchronizer = noted(overlap=True)
    synchronizer.announce(0.5)
    assert client.notes.pop() == ("ahead", 0.5, True)
    for bucket, pushed in [(1, []), (0, [0, 1]), (2, [0, 1, 2])]:
        synchronizer.mark_ready(bucket)
        assert client.notes == pushed
    synchronizer.finish(0.5)
    assert client.notes == [0, 1, 2, ("commit", 0.5)]


def test_without_overlap_buckets_are_pushed_at_the_end() -> None:
    client, synchronizer = noted(overlap=False)
    synchronizer.announce(0.5)
    for bucket in (0, 2, 1):
        synchronizer.mark_ready(bucket)
    assert client.notes == []
    synchronizer.finish(0.5)
    assert client.notes == [0, 1, 2, ("commit", 0.5)]


@pytest.mark.parametrize("overlap", [True, False])
def test_every_step_begins_anew(overlap: bool) -> None:
    client, synchronizer = noted(overlap=overlap)
    for step in range(2):
        client.notes.clear()
        synchronizer.mark_ready(0)
        synchronizer.finish(step)
        assert client.notes == [0, 1, 2, ("commit", step)]


def test_leaving_by_an_error_tells_why() -> None:
    client, synchronizer = noted(overlap=True)
    with pytest.raises(KeyError), synchronizer:
        raise KeyError("pixel")
    assert client.notes == [("close", "KeyError: 'pixel'")]


def test_it_says_what_it_is() -> None:
    _, synchronizer = noted(overlap=True)
    assert (synchronizer.scheme, synchronizer.backend) == ("ps", "none")
    assert (synchronizer.rank, synchronizer.nranks, synchronizer.servers) == (0, 1, 1)
