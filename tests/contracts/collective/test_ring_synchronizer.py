"""The ring's synchronizer keeps the contract over every backend, and says what went wrong beside backward."""

from __future__ import annotations

import threading

import numpy as np
import pytest

pytest.importorskip("paddle")

from collective.synchronizer import RingSynchronizer
from common.errors import PeerLost, UsageError
from common.tensors.optimizers import SGD, Adagrad, Adam, AdamW, Momentum, RMSProp
from tests.support.groups import BACKENDS, CANONICAL, DEADLINE_S, assert_same_bits, mesh_groups, on_threads
from tests.support.synchronizer_contract import BETWEEN_RANKS, CHECKS, check_overlap_changes_no_bits, name_of
from tests.support.synchronizer_steps import BUCKETS, errors_of, new_arena
from tests.support.thorough import and_long

FEW = [("memory", 1), ("memory", 3), ("shm", 2), ("tcp", 3)]  # groups have shown that backends are alike
ALONE, TOGETHER = ([(backend, n) for backend in CANONICAL for n in nranks] for nranks in ((1,), (2, 3)))
between_ranks = pytest.mark.parametrize(("backend", "nranks"), and_long(FEW[1:], TOGETHER))
everywhere = pytest.mark.parametrize(("backend", "nranks"), and_long(FEW, [*ALONE, *TOGETHER]))


def job(backend, nranks, *, overlap=True):
    """The `make` of one job."""
    groups = mesh_groups(backend, nranks)
    return lambda rank, _nranks: RingSynchronizer(groups[rank], overlap=overlap)


@everywhere
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_contract(check, backend, nranks):
    check(job(backend, nranks), nranks)


@between_ranks
@pytest.mark.parametrize("check", BETWEEN_RANKS, ids=name_of)
def test_contract_between_ranks(check, backend, nranks):
    check(job(backend, nranks), nranks)


@everywhere
@pytest.mark.parametrize("check", [c for c in CHECKS if "without_an_optimizer" not in c.__name__], ids=name_of)
def test_contract_with_a_sharded_optimizer(check, backend, nranks):
    groups = mesh_groups(backend, nranks)
    check(lambda rank, _nranks: RingSynchronizer(groups[rank], shard_optimizer=True), nranks)


@pytest.mark.parametrize("optimizer", [SGD(), Momentum(weight_decay=0.5), Adagrad(), RMSProp(), Adam(), AdamW()])
def test_a_sharded_optimizer_gives_the_same_bits_with_less_state(optimizer):
    def train(shard):
        groups = mesh_groups("shm", 3)

        def one_rank(rank):
            with RingSynchronizer(groups[rank], shard_optimizer=shard) as synchronizer:
                arena = new_arena(synchronizer)
                synchronizer.attach(arena, optimizer)
                for step in range(4):
                    arena.gradients[:] = np.random.default_rng([rank, step]).standard_normal(arena.gradients.size)
                    synchronizer.finish(0.25)
                state = sum(updater.state_elements() for updater in synchronizer._updaters)
                return arena.parameters.tobytes(), state

        return on_threads(3, one_rank)

    whole, sharded = train(False), train(True)
    assert {bits for bits, _ in whole} == {bits for bits, _ in sharded}
    assert len({bits for bits, _ in sharded}) == 1
    powers = 2 * BUCKETS if optimizer.name.startswith("adam") else 0  # of beta: two for each bucket
    uneven = 2 * 16 * BUCKETS  # chunks are cut at multiples of 16 elements; two moments at most
    assert max(state for _, state in sharded) <= whole[0][1] / 3 + powers + uneven


@pytest.mark.parametrize(("backend", "common"), [("shm", True), ("tcp", False)])
def test_ranks_of_one_host_have_parameters_in_common_while_they_train(backend, common):
    """Each writes one of its own chunk, which the others then see; and when they have left, nobody sees the others'."""
    groups = mesh_groups(backend, 3)

    def one_rank(rank):
        with RingSynchronizer(groups[rank], shard_optimizer=True) as synchronizer:
            arena = new_arena(synchronizer)
            synchronizer.attach(arena, SGD())
            arena.gradients[:] = 1
            synchronizer.finish(0.25)
            before = arena.parameters.copy()
            groups[rank].barrier()
            arena.parameters[rank] = 10 + rank
            groups[rank].barrier()
            seen = arena.parameters[:3].copy()
            groups[rank].barrier()
        arena.parameters[rank] = 20 + rank
        return before, seen, arena

    (before, seen, arena), *others = on_threads(3, one_rank)
    for rank, (theirs, saw, left) in enumerate([(before, seen, arena), *others]):
        assert_same_bits(theirs, before)
        expected = np.array([10, 11, 12], np.float32) if common else before[:3].copy()
        expected[rank] = 10 + rank
        assert_same_bits(saw, expected)
        expected[rank] = 20 + rank
        assert_same_bits(left.parameters[:3], expected)


def test_sharding_must_be_everyones():
    groups = mesh_groups("shm", 2)
    found = errors_of(
        lambda rank, _nranks: RingSynchronizer(groups[rank], shard_optimizer=rank == 1),
        2,
        lambda synchronizer: synchronizer.attach(new_arena(synchronizer), SGD()),
    )
    assert any("disagree on the sharding" in str(error) for error in found)


def test_there_must_be_an_optimizer_to_shard():
    with (
        RingSynchronizer(mesh_groups("memory", 1)[0], shard_optimizer=True) as synchronizer,
        pytest.raises(UsageError, match="--shard-optimizer needs the built-in trainer"),
    ):
        synchronizer.attach(new_arena(synchronizer), None)


@everywhere
def test_overlap_changes_no_bits(backend, nranks):
    check_overlap_changes_no_bits(job(backend, nranks), job(backend, nranks, overlap=False), nranks)


@pytest.mark.parametrize("method", ["mark_ready", "finish"])
def test_a_step_before_attach_is_refused(method):
    with job("memory", 1)(0, 1) as synchronizer, pytest.raises(RuntimeError, match="attach an arena first"):
        getattr(synchronizer, method)(0)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_beside_backward_is_raised_by_finish_and_leaves_the_parameters_alone(backend, overlap):
    """`mark_ready` never blocks and never raises for what another rank did."""

    def body(synchronizer):
        arena = new_arena(synchronizer)
        synchronizer.attach(arena, SGD())
        if synchronizer.rank == 1:
            raise ValueError("boom")
        before = arena.parameters.copy()
        arena.gradients.fill(1)
        for bucket in range(BUCKETS):
            synchronizer.mark_ready(bucket)
        with pytest.raises(PeerLost, match="rank 1 left with ValueError: boom"):
            synchronizer.finish(0.5)
        np.testing.assert_array_equal(arena.parameters, before)

    first, second = errors_of(job(backend, 2, overlap=overlap), 2, body)
    assert first is None
    assert type(second) is ValueError


@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_are_reduced_beside_backward_or_in_finish_always_in_order(overlap, monkeypatch):
    started, all_started = [], threading.Event()

    def reduce(self, bucket):
        started.append((bucket, threading.current_thread() is threading.main_thread()))
        if len(started) == BUCKETS:
            all_started.set()

    monkeypatch.setattr(RingSynchronizer, "_reduce", reduce)
    with job("memory", 1, overlap=overlap)(0, 1) as synchronizer:
        synchronizer.attach(new_arena(synchronizer), SGD())
        for bucket in reversed(range(BUCKETS)):
            synchronizer.mark_ready(bucket)
        assert not overlap or all_started.wait(DEADLINE_S)
        synchronizer.finish(0.5)
    assert started == [(bucket, not overlap) for bucket in range(BUCKETS)]
