"""The contract of messengers, over the sockets between the ranks of a group; and what is theirs alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("paddle")

from collective.membership.messages import PIECE_BYTES
from collective.synchronizer import RingSynchronizer
from common.errors import PeerLost, PeerStalled
from common.network.patience import Patience
from common.sync.synchronizer import Synchronizer
from tests.support.groups import Group, mesh_groups, on_ranks, outcomes_of
from tests.support.messenger_contract import CHECKS, Check, name_of

pytestmark = pytest.mark.contract

BACKENDS = ("shm", pytest.param("tcp", marks=pytest.mark.long))


class Ranks:
    """`make` of the contract: all ranks of one group at a time, connected by whoever comes first."""

    def __init__(self, backend: str, nranks: int) -> None:
        self._groups = mesh_groups(backend, nranks)

    @contextmanager
    def __call__(self, rank: int, nranks: int) -> Iterator[Synchronizer]:
        with RingSynchronizer(self._groups[rank]) as synchronizer:
            yield synchronizer


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_contract(check: Check, backend: str, nranks: int) -> None:
    check(Ranks(backend, nranks), nranks)


@pytest.fixture
def pair() -> Iterator[list[Group]]:
    groups = mesh_groups("tcp", 2)
    yield groups
    for group in groups:
        group.close()


def test_sizes_around_a_piece(pair: list[Group]) -> None:
    sizes = [PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, 0]
    data = [np.random.default_rng(size).bytes(size) for size in sizes]

    def body(group: Group) -> None:
        for each in data:
            group.messenger.send(1 - group.rank, 1, each)
        for each in data:
            assert group.messenger.receive(1 - group.rank, 1) == each

    on_ranks(pair, body)


def test_the_groups_own_calls_pass_between_messages(pair: list[Group]) -> None:
    """What came while a rank was in a call of the group is kept."""

    def body(group: Group) -> None:
        for number in range(5):
            group.messenger.send(1 - group.rank, 0, bytes([number]) * (number * 100_000))
            array = np.full(33, 1.0 + group.rank)
            group.all_reduce(array, "sum")
            assert array.tolist() == [3.0] * 33
        for number in range(5):
            assert group.messenger.receive(1 - group.rank, 0) == bytes([number]) * (number * 100_000)

    on_ranks(pair, body)


def test_a_rank_that_never_sends_is_named(pair: list[Group]) -> None:
    """Threads of one process always give a sign of life, so only the limit for who lives ends this."""
    for group in pair:
        mesh_of(group).patience = Patience(0.3, 0.5)

    def body(rank: int) -> None:
        if rank == 0:
            pair[0].messenger.receive(1, 0)

    error = outcomes_of(2, body)[0].error
    assert type(error) is PeerStalled
    assert "rank 1 did not take part for 0.5 s" in str(error)


def test_who_sends_to_a_rank_that_never_reads_learns_of_its_end(pair: list[Group]) -> None:
    """A signless one: its thread is held up, so the sockets between them stay full."""
    held, mesh = mesh_of(pair[1]), mesh_of(pair[0])

    def body(rank: int) -> None:
        if rank == 0:
            pair[0].messenger.send(1, 0, bytes(50_000_000))
            return
        with held._lock:
            while not mesh.peers[1].unsent:
                time.sleep(0.001)
        pair[1].close("ValueError: enough")

    error = outcomes_of(2, body)[0].error
    assert error is None or (type(error) is PeerLost and "ValueError: enough" in str(error))


def test_after_the_end_there_is_nobody_to_send_to(pair: list[Group]) -> None:
    pair[0].close()
    with pytest.raises(RuntimeError, match="the group is closed"):
        pair[0].messenger.send(1, 0, b"")
    with pytest.raises(PeerLost, match="rank 0 finished while rank 1 was waiting for a message"):
        pair[1].messenger.receive(0, 0)


def mesh_of(group: Group) -> object:
    return group.messenger._mesh  # type: ignore[attr-defined]
