"""The parameter-server synchronizer: the contract of all synchronizers, and the bits of the ring with Paddle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import pytest

pytest.importorskip("paddle")

from collective.synchronizer import RingSynchronizer
from common import rpc
from common.arena import Arena, FloatArray, Layout
from common.buckets import plan_buckets
from common.optimizers import Adam, Momentum, Optimizer
from common.synchronizer import Synchronizer
from ps.client import Client
from ps.servicer import ParameterServer
from ps.synchronizer import ServerSynchronizer
from tests.groups import mesh_groups, on_threads, reduced, sample
from tests.synchronizer_contract import BETWEEN_RANKS, CHECKS, Check, Make, check_overlap_changes_no_bits, name_of

STEPS = 5
SHAPES = [("a", (7, 11)), ("b", (33,)), ("c", (5, 3, 3))]
OPTIMIZERS = [Adam(learning_rate=0.01), Momentum(learning_rate=0.01, momentum=0.8)]


@pytest.fixture(autouse=True)
def _quick_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers listen already; a channel that has waited for that takes gRPC 0.2 s to close (test_ps_client.py)."""
    monkeypatch.setattr(rpc, "connect", lambda address, timeout: grpc.insecure_channel(address, rpc.CHANNEL_OPTIONS))


@contextmanager
def serving(nranks: int, servers: int) -> Iterator[list[str]]:
    with ExitStack() as stack:
        opened = [ParameterServer("127.0.0.1:0", nranks, shard=(index, servers)) for index in range(servers)]
        for server in opened:
            stack.enter_context(server)
        yield [server.address for server in opened]


# The contract of all synchronizers

COMBINATIONS = [(nranks, servers) for nranks in (1, 2, 3) for servers in (1, 2)]
everywhere = pytest.mark.parametrize(("nranks", "servers"), COMBINATIONS)
between_ranks = pytest.mark.parametrize(("nranks", "servers"), [(2, 1), (2, 2), (3, 1), (3, 2)])


@contextmanager
def job(nranks: int, servers: int, *, overlap: bool = True) -> Iterator[Make]:
    with serving(nranks, servers) as addresses:
        yield lambda rank, nranks: ServerSynchronizer(Client(addresses, rank, nranks), overlap=overlap)


@everywhere
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_contract(check: Check, nranks: int, servers: int) -> None:
    with job(nranks, servers) as make:
        check(make, nranks)


@between_ranks
@pytest.mark.parametrize("check", BETWEEN_RANKS, ids=name_of)
def test_contract_between_ranks(check: Check, nranks: int, servers: int) -> None:
    with job(nranks, servers) as make:
        check(make, nranks)


@everywhere
def test_overlap_changes_no_bits(nranks: int, servers: int) -> None:
    with job(nranks, servers) as overlapping, job(nranks, servers, overlap=False) as waiting:
        check_overlap_changes_no_bits(overlapping, waiting, nranks)


# The bits of the ring


def make_arena(rank: int) -> Arena:
    layout = Layout.of(SHAPES)
    arena = Arena(
        layout, buckets=plan_buckets([s.start for s in layout.slots], layout.length, first_bytes=64, bucket_bytes=256)
    )
    for slot in layout.slots:
        arena.parameter(slot)[...] = sample(rank, slot.shape, "float32", seed=77)
    return arena


def train(synchronizer: Synchronizer, optimizer: Optimizer) -> list[FloatArray]:
    """The parameters after attaching and after every step."""
    arena = make_arena(synchronizer.rank)
    with synchronizer:
        synchronizer.attach(arena, optimizer)
        seen = [arena.parameters.copy()]
        for step in range(STEPS):
            arena.gradients.fill(0)
            for slot in arena.layout.slots:
                arena.gradients[slot.start : slot.stop] = sample(synchronizer.rank, slot.size, "float32", seed=step)
            for bucket in reversed(range(len(arena.buckets))):
                synchronizer.mark_final(bucket)
            synchronizer.finish(optimizer.learning_rate / (1 + step))
            seen.append(arena.parameters.copy())
    return seen


def ring_parameters(nranks: int, optimizer: Optimizer) -> list[list[FloatArray]]:
    groups = mesh_groups("memory", nranks)
    return on_threads(nranks, lambda rank: train(RingSynchronizer(groups[rank]), optimizer))


def server_parameters(nranks: int, servers: int, optimizer: Optimizer) -> list[list[FloatArray]]:
    with job(nranks, servers) as make:
        return on_threads(nranks, lambda rank: train(make(rank, nranks), optimizer))


def assert_same(got: list[list[FloatArray]], expected: list[FloatArray]) -> None:
    for rank, history in enumerate(got):
        for step, (mine, theirs) in enumerate(zip(history, expected, strict=True)):
            assert mine.tobytes() == theirs.tobytes(), f"rank {rank} after {step} steps"


@everywhere
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_servers_and_ring_give_the_same_bits(optimizer: Optimizer, nranks: int, servers: int) -> None:
    ring = ring_parameters(nranks, optimizer)
    assert_same(ring, ring[0])
    assert_same(server_parameters(nranks, servers, optimizer), ring[0])
    assert (ring[0][0] == make_arena(0).parameters).all()
    assert all((ring[0][step] != ring[0][step + 1]).any() for step in range(STEPS))


@everywhere
def test_without_an_optimizer_gradients_are_averaged_and_parameters_left(nranks: int, servers: int) -> None:
    with job(nranks, servers) as make:
        seen = on_threads(nranks, lambda rank: averages(make(rank, nranks)))
    for history in seen:
        for step, gradients in enumerate(history):
            assert gradients.tobytes() == expected_mean(nranks, step).tobytes()


def averages(synchronizer: Synchronizer) -> list[FloatArray]:
    """The gradients after every step; the caller moves its own parameters meanwhile."""
    arena, seen = make_arena(synchronizer.rank), []
    with synchronizer:
        synchronizer.attach(arena, None)
        assert arena.parameters.tobytes() == make_arena(0).parameters.tobytes()
        for step in range(STEPS):
            arena.parameters.fill(step)
            arena.gradients[...] = sample(synchronizer.rank, arena.layout.length, "float32", seed=step)
            synchronizer.finish(0.1)
            assert (arena.parameters == step).all()
            seen.append(arena.gradients.copy())
    return seen


def expected_mean(nranks: int, step: int) -> FloatArray:
    arena = make_arena(0)
    gradients = [sample(rank, arena.layout.length, "float32", seed=step) for rank in range(nranks)]
    for b in arena.buckets:
        arena.gradients[b.start : b.stop] = reduced([g[b.start : b.stop] for g in gradients], "mean")
    return arena.gradients


# When buckets are pushed, seen by a client that only takes notes


class NotingClient:
    rank, nranks, servers = 0, 1, ("nowhere:1",)

    def __init__(self) -> None:
        self.notes: list[object] = []

    def register(self, arena: Arena, optimizer: Optimizer) -> None:
        self.notes.append("register")

    def push(self, bucket: int) -> None:
        self.notes.append(bucket)

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
    for bucket, pushed in [(1, []), (0, [0, 1]), (2, [0, 1, 2])]:
        synchronizer.mark_final(bucket)
        assert client.notes == pushed
    synchronizer.finish(0.5)
    assert client.notes == [0, 1, 2, ("commit", 0.5)]


def test_without_overlap_buckets_are_pushed_at_the_end() -> None:
    client, synchronizer = noted(overlap=False)
    for bucket in (0, 2, 1):
        synchronizer.mark_final(bucket)
    assert client.notes == []
    synchronizer.finish(0.5)
    assert client.notes == [0, 1, 2, ("commit", 0.5)]


@pytest.mark.parametrize("overlap", [True, False])
def test_every_step_begins_anew(overlap: bool) -> None:
    client, synchronizer = noted(overlap=overlap)
    for step in range(2):
        client.notes.clear()
        synchronizer.mark_final(0)
        synchronizer.finish(step)
        assert client.notes == [0, 1, 2, ("commit", step)]


def test_leaving_by_an_error_tells_why() -> None:
    client, synchronizer = noted(overlap=True)
    with pytest.raises(KeyError), synchronizer:
        raise KeyError("pixel")
    assert client.notes == [("close", "KeyError: 'pixel'")]


def test_it_says_what_it_is() -> None:
    synchronizer = ServerSynchronizer(NotingClient())
    assert (synchronizer.scheme, synchronizer.backend) == ("ps", "grpc")
    assert (synchronizer.rank, synchronizer.nranks, synchronizer.servers) == (0, 1, 1)
