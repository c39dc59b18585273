"""Large groups, where a rank is connected with some others only: all learn who has died, and nobody else is blamed."""

from __future__ import annotations

import math
import os
import random
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from collective.membership.liveness import Mesh
from collective.membership.overlay import FEW, children, neighbours, within
from collective.membership.signs import Signs, Told
from common.errors import GradSyncError, PeerLost, PeerStalled
from tests.support.groups import DEADLINE_S, Group, mesh_groups, on_ranks, on_threads, outcomes_of, reduced, sample

MANY = FEW + 3
Pairs = set[tuple[int, int]]


# Who is connected with whom


@pytest.mark.parametrize("count", [1, 2, FEW, FEW + 1, 31, 32, 33, 100, 256, 1000])
def test_all_are_connected_by_few_steps(count: int) -> None:
    around = [within(index, count) for index in range(count)]
    assert all(index in around[other] and other != index for index in range(count) for other in around[index])
    steps, ahead = {0: 0}, deque([0])
    while ahead:
        here = ahead.popleft()
        for there in around[here] - steps.keys():
            steps[there] = steps[here] + 1
            ahead.append(there)
    assert len(steps) == count
    assert max(steps.values()) <= 1 if count <= FEW else max(steps.values()) < math.log2(count)
    assert len(around[0]) <= max(FEW - 1, 2 * count.bit_length())


@pytest.mark.parametrize("count", [2, FEW, FEW + 1, 40, 100])
def test_what_a_rank_passes_on_reaches_each_once(count: int) -> None:
    for root in (0, count // 2, count - 1):
        reached, ahead = [], [root]
        while ahead:
            here = ahead.pop()
            reached.append(here)
            for there in children(here, root, count):
                assert there in within(here, count)
                ahead.append(there)
        assert sorted(reached) == list(range(count))


def test_ranks_of_a_host_and_those_with_data_are_neighbours_too() -> None:
    host = range(40, 60)
    for rank in host:
        for other in neighbours(rank, 400, host, linked=[(rank + 20) % 400, (rank - 20) % 400]):
            linked = [(other + 20) % 400, (other - 20) % 400]
            assert rank in neighbours(other, 400, host if other in host else (), linked)
    assert {41, 47, 48} - set(neighbours(40, 400, host)) == {47}  # 41 and 48 are 1 and 8 away


# What one tells the others


def mesh_over(pairs: Pairs, nranks: int, stack: ExitStack, timeout: float = DEADLINE_S) -> list[Mesh]:
    ends: list[dict[int, socket.socket]] = [{} for _ in range(nranks)]
    for one, other in pairs:
        ends[one][other], ends[other][one] = socket.socketpair()
    meshes = [Mesh(rank, ends[rank], nranks=nranks, timeout=timeout) for rank in range(nranks)]
    for mesh in meshes:
        stack.callback(mesh.close)
    return meshes


def connected_pairs(nranks: int, chance: random.Random) -> Pairs:
    """Of a graph in which all can be reached: a tree, and some more."""
    pairs = {(chance.randrange(rank), rank) for rank in range(1, nranks)}
    for _ in range(chance.randrange(2 * nranks)):
        one, other = sorted(chance.sample(range(nranks), 2))
        pairs.add((one, other))
    return pairs


def failure_of(mesh: Mesh) -> GradSyncError:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            mesh.check()
        except GradSyncError as exc:
            return exc
        time.sleep(0.002)
    raise AssertionError(f"rank {mesh.rank} heard nothing")


def die(mesh: Mesh) -> None:
    """As a process does that is killed: it tells nobody what it hears then."""
    with mesh._lock:
        mesh._closed.set()
        for peer in mesh.peers.values():
            peer.connection.shutdown(socket.SHUT_RDWR)
    os.eventfd_write(mesh._wake, 1)
    mesh._thread.join()
    mesh._closed.clear()  # to be closed like the others


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(s, marks=pytest.mark.long) for s in range(6, 60))])
def test_every_survivor_learns_of_a_death_and_blames_nobody_who_lives(seed: int) -> None:
    chance = random.Random(seed)
    nranks = chance.randrange(FEW + 1, 28)
    dead = chance.sample(range(nranks), chance.randrange(1, 5))
    with ExitStack() as stack:
        meshes = mesh_over(connected_pairs(nranks, chance), nranks, stack)
        for rank in dead:
            die(meshes[rank])
        survivors = [mesh for mesh in meshes if mesh.rank not in dead]
        told = {mesh.rank: failure_of(mesh) for mesh in survivors}
        for mesh in survivors:
            assert type(told[mesh.rank]) is PeerLost
            assert mesh._culprit in dead
            assert str(told[mesh.rank]) == f"rank {mesh._culprit} died: its connection closed without a goodbye"


# Groups of real connections


@contextmanager
def opened(backend: str, nranks: int = MANY, timeout: float = 30.0) -> Iterator[list[Group]]:
    groups = mesh_groups(backend, nranks, timeout=timeout)
    try:
        yield groups
    finally:
        on_threads(nranks, lambda rank: groups[rank].close())


def mesh_of(group: Group) -> Mesh:
    found: Mesh = group.messenger._mesh  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("backend", ["shm", "tcp-ring", "tcp", "tcp-hierarchical"])
def test_the_bits_are_the_same(backend: str) -> None:
    nranks = MANY if backend != "tcp-hierarchical" else 36
    inputs = [sample(rank, 5_001, "float32") for rank in range(nranks)]

    def body(group: Group) -> list[bytes]:
        short, apart = inputs[group.rank][:1001].copy(), inputs[group.rank].copy()
        here = group.empty(5_001)
        here[...] = apart
        for each in (short, apart, here):
            group.all_reduce(each)
        group.barrier()
        return [each.tobytes() for each in (short, apart, here)]

    with opened(backend, nranks) as groups:
        results = on_ranks(groups, body)
    whole = reduced(inputs, "mean").tobytes()
    expected = [reduced([each[:1001] for each in inputs], "mean").tobytes(), whole, whole]
    assert results == [expected] * nranks


def test_a_rank_has_few_sockets_and_opens_more_for_messages() -> None:
    def body(group: Group) -> int:
        mesh, messenger = mesh_of(group), group.messenger
        before = len(mesh.sockets)
        for step in range(1, MANY):  # to each in turn, so that all are waited for
            to, source = (group.rank + step) % MANY, (group.rank - step) % MANY
            messenger.send(to, step, bytes([group.rank]) * 300_000)
            assert messenger.receive(source, step) == bytes([source]) * 300_000
            messenger.send(to, step, b"again")
            assert messenger.receive(source, step) == b"again"
        return before

    with opened("shm") as groups:
        sockets = on_ranks(groups, body)
        assert sockets == [len(within(0, MANY))] * MANY
        away = [MANY - 1 - each for each in sockets]
        assert [len(mesh_of(group).sockets) for group in groups] == [
            each + 2 * more for each, more in zip(sockets, away, strict=True)
        ]


def test_who_left_is_not_waited_for_by_who_is_no_neighbour() -> None:
    """Nor before it has been asked for what it sent."""
    far = next(rank for rank in range(MANY) if rank not in within(0, MANY) | {0})
    with opened("shm", timeout=4.0) as groups:
        groups[far].messenger.send(0, 1, b"the last")
        groups[far].close()
        assert groups[0].messenger.receive(far, 1) == b"the last"
        with pytest.raises(PeerLost, match=f"rank {far} finished while rank 0 was waiting for a message"):
            groups[0].messenger.receive(far, 1)


def test_a_rank_that_died_is_named_by_all() -> None:
    with opened("tcp") as groups:
        die(mesh_of(groups[5]))
        errors = [failure_of(mesh_of(group)) for group in groups if group.rank != 5]
    assert Counter(map(str, errors)) == {"rank 5 died: its connection closed without a goodbye": MANY - 1}


def test_a_frozen_rank_is_named_by_who_is_no_neighbour_and_a_busy_one_is_not() -> None:
    frozen = 7
    far = [rank for rank in range(MANY) if rank not in within(frozen, MANY) | {frozen}]
    with opened("shm", timeout=1.0) as groups:
        meshes = [mesh_of(group) for group in groups]

        def body(rank: int) -> None:
            if rank == far[0]:  # alone: all others are busy
                since = time.monotonic()
                while True:
                    meshes[rank].wait_on(None, "waiting", since)
                    meshes[rank].check()
                    time.sleep(0.02)

        with meshes[frozen]._lock:
            error = outcomes_of(MANY, body)[far[0]].error
    assert type(error) is PeerStalled
    assert str(error).startswith(f"rank {frozen} did not take part for 1 s")
    assert "no sign of life" in str(error)


# Signs of life


def told(signs: Signs, now: float, waited: float = 0.0) -> Told:
    return Told(*signs.tell(waited, now)["signs"])


def test_old_news_stay_old() -> None:
    """However often they are told."""
    one, other = Signs(0, 3, 1.0), Signs(1, 3, 1.0)
    third = Signs(2, 3, 1.0)
    one.hear(told(third, 0.0, waited=4.0), 5.0)
    for now in range(6, 30):
        other.hear(told(one, now), now)
        one.hear(told(other, now), now)
    assert one.of(2) == (5.0, 4.0)
    assert other.of(2) == (6.0, 4.0)


def test_a_group_falls_asleep_when_nobody_waits() -> None:
    nranks, period = 40, 1.0
    every = [Signs(rank, nranks, period) for rank in range(nranks)]
    every[3].wake(0.0)
    awake = []
    for tenths in range(300):
        now = tenths / 10
        if now < 5.0:
            every[3].wake(now)
        for signs in every:
            if not signs.due(now):
                message = told(signs, now, waited=now if signs.rank == 3 else 0.0)
                for other in within(signs.rank, nranks):
                    every[other].hear(message, now)
        awake.append(sum(signs.due(now) < math.inf for signs in every))
    assert max(awake) == nranks
    assert awake[-1] == 0
    assert all(signs.of(3)[1] > 3.0 for signs in every if signs.rank != 3)
