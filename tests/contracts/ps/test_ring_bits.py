"""The parameter-server synchronizer with Paddle gives the bits of the ring."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")

from collective.synchronizer import RingSynchronizer
from common.sync.synchronizer import Synchronizer
from common.tensors.arena import FloatArray
from common.tensors.optimizers import Adam, Momentum, Optimizer
from ps.store.modes import SYNC, Mode
from tests.support.groups import mesh_groups, on_threads, reduced, sample
from tests.support.server_jobs import everywhere, job, make_arena

STEPS = 5
OPTIMIZERS = [Adam(learning_rate=0.01), Momentum(learning_rate=0.01, momentum=0.8)]


def train(synchronizer: Synchronizer, optimizer: Optimizer) -> list[FloatArray]:
    """The parameters after attaching and after every step."""
    arena = make_arena(synchronizer.rank)
    with synchronizer:
        synchronizer.attach(arena, optimizer)
        seen = [arena.parameters.copy()]
        for step in range(STEPS):
            if step:  # the first one as by those that know it only at the end
                synchronizer.announce(optimizer.learning_rate / (1 + step))
            arena.gradients.fill(0)
            for slot in arena.layout.slots:
                arena.gradients[slot.start : slot.stop] = sample(synchronizer.rank, slot.size, "float32", seed=step)
            for bucket in reversed(range(len(arena.buckets))):
                synchronizer.mark_ready(bucket)
            synchronizer.finish(optimizer.learning_rate / (1 + step))
            seen.append(arena.parameters.copy())
    return seen


def ring_parameters(nranks: int, optimizer: Optimizer) -> list[list[FloatArray]]:
    groups = mesh_groups("memory", nranks)
    return on_threads(nranks, lambda rank: train(RingSynchronizer(groups[rank]), optimizer))


def server_parameters(
    nranks: int, servers: int, plane: str, optimizer: Optimizer, mode: Mode
) -> list[list[FloatArray]]:
    with job(nranks, servers, plane, mode=mode) as make:
        return on_threads(nranks, lambda rank: train(make(rank, nranks), optimizer))


def assert_same(got: list[list[FloatArray]], expected: list[FloatArray]) -> None:
    for rank, history in enumerate(got):
        for step, (mine, theirs) in enumerate(zip(history, expected, strict=True)):
            assert mine.tobytes() == theirs.tobytes(), f"rank {rank} after {step} steps"


@everywhere
@pytest.mark.parametrize("mode", [SYNC, Mode("ssp", 0)], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_servers_and_ring_give_the_same_bits(
    optimizer: Optimizer, mode: Mode, nranks: int, servers: int, plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps.store.make.PIECE", 32)
    ring = ring_parameters(nranks, optimizer)
    assert_same(ring, ring[0])
    assert_same(server_parameters(nranks, servers, plane, optimizer, mode), ring[0])
    assert (ring[0][0] == make_arena(0).parameters).all()
    assert all((ring[0][step] != ring[0][step + 1]).any() for step in range(STEPS))


@everywhere
def test_without_an_optimizer_gradients_are_averaged_and_parameters_left(nranks: int, servers: int, plane: str) -> None:
    with job(nranks, servers, plane) as make:
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
