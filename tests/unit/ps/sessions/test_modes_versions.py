"""Modes ssp, async and geo between real clients and servers: whole versions, nothing lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from common.system.memory import aligned_empty
from common.tensors.arena import Arena, FloatArray
from common.tensors.buckets import plan_buckets
from common.tensors.optimizers import SGD, Optimizer
from ps.client.client import Client
from ps.coordinator.servicer import ParameterServer
from ps.store.modes import ASYNC, Mode
from ps.synchronizer import GeoSynchronizer, ServerSynchronizer, synchronizer_for
from tests.support.groups import on_threads
from tests.support.numpy_optimizer import instead_of_paddle
from tests.support.relaxed_sessions import GEO, RELAXED, geo_layout
from tests.support.sessions import addresses, expected_after, make_arena, planes_with, serving, take_step

Planes = Sequence[tuple[str, bool]]


def run(
    mode: Mode, servers: int, chosen: Planes, body: Callable[[Client, Arena], Any], **shape: Any
) -> tuple[list[Any], list[ParameterServer]]:
    """What `body` returns on each of three ranks, parameters being rank 0's at first."""

    def on_rank(rank: int) -> Any:
        plane, shared = chosen[rank]
        with Client(addresses(group), rank, 3, data_plane=plane, mode=mode) as client:
            arena = make_arena(rank, empty=client.empty if shared else aligned_empty, **shape)
            arena.parameters[...] = rank
            client.register(arena, SGD())
            return body(client, arena)

    with serving(3, servers) as group:
        return on_threads(3, on_rank), group


@planes_with("servers", [1, 2])
def test_ssp_with_a_bound_of_zero_gives_numpys_bits(servers: int, planes: Planes) -> None:
    pytest.importorskip("paddle")  # here, not first on a server's thread, which Paddle would then not compute on

    def body(client: Client, arena: Arena) -> list[FloatArray]:
        seen = []
        for _ in range(3):
            take_step(client, arena)
            seen.append(arena.parameters.copy())
        return seen

    def from_samples(rank: int) -> list[FloatArray]:
        plane, shared = planes[rank]
        with Client(addresses(group), rank, 3, data_plane=plane, mode=Mode("ssp", 0)) as client:
            arena = make_arena(rank, empty=client.empty if shared else aligned_empty)
            client.register(arena, SGD())
            return body(client, arena)

    with serving(3, servers) as group:
        histories = on_threads(3, from_samples)
    for history in histories:
        for step, parameters in enumerate(history):
            assert parameters.tobytes() == expected_after(step + 1, 3, make_arena(0)).tobytes()


class Counter:
    """Parameters are the number of updates they have seen; written in two halves."""

    def __init__(self, _: Optimizer, parameters: FloatArray, gradients: FloatArray) -> None:
        self.parameters = parameters

    def step(self, learning_rate: float, used: bytes = b"") -> None:
        middle = self.parameters.size // 2
        self.parameters[:middle] += 1
        self.parameters[middle:] += 1


@planes_with("mode", [Mode("ssp", 0), Mode("ssp", 1), Mode("ssp", 3), ASYNC])
def test_a_trainer_reads_whole_versions_within_the_bound(
    monkeypatch: pytest.MonkeyPatch, mode: Mode, planes: Planes
) -> None:
    """Of each slice; large enough to be sent in several pieces."""
    instead_of_paddle(monkeypatch, flat=Counter)
    steps, shapes = 12, [("w", (300_000,)), ("v", (333, 1000))]

    def body(client: Client, arena: Arena) -> list[tuple[float, float]]:
        def versions() -> list[float]:
            found = [arena.parameters[s.shard.start : s.shard.stop] for s in client._servers.sessions]
            assert all(np.all(part == part[0]) for part in found), "a torn version"
            return [float(part[0]) for part in found]

        seen = [versions()]
        for _ in range(steps):
            for bucket in range(len(arena.buckets)):
                client.push(bucket)
            client.commit(0.1)
            seen.append(versions())
        client.all_gather(np.zeros(1))
        client.pull()
        return [(min(each), max(each)) for each in [*seen, versions()]]

    histories, _ = run(mode, 2, planes, body, shapes=shapes, bucket_bytes=1_000_000)
    for history in histories:
        assert history[0] == (0, 0)
        for step, (low, high) in enumerate(history[:-1]):
            if mode.staleness is None:
                assert step <= low <= high <= 3 * steps  # its own are among them
            else:
                assert step - mode.staleness <= low <= high <= step
        final = steps * (1 if mode.staleness is not None else 3)
        assert history[-1] == (final, final)


@planes_with("mode, servers", RELAXED, [1, 2])
def test_every_gradient_counts_once(mode: Mode, servers: int, planes: Planes) -> None:
    """Whole numbers, whose float32 sums are exact in any order; a trainer writes over its own when a commit returns."""
    steps = 6

    def gradients(rank: int, step: int, length: int) -> FloatArray:
        return np.random.default_rng([rank, step]).integers(-99, 99, length).astype(np.float32) * 3

    def body(client: Client, arena: Arena) -> FloatArray:
        for step in range(steps):
            arena.gradients[...] = gradients(client.rank, step, arena.layout.length)
            for bucket in range(len(arena.buckets)):
                client.push(bucket)
            client.commit(1.0)
            arena.gradients.fill(np.nan)
        client.all_gather(np.zeros(1))
        client.pull()
        return arena.parameters.copy()

    results, _ = run(mode, servers, planes, body)
    length = results[0].size
    total = np.sum([gradients(rank, step, length) for rank in range(3) for step in range(steps)], axis=0)
    share = np.float32(1 / 3)
    expected = {"ssp": -total * share, "async": -total, "geo": total * share}[mode.name]
    for result in results:
        if mode == ASYNC:
            np.testing.assert_array_equal(result, expected)
        else:
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-3)
        assert result.tobytes() == results[0].tobytes()


def test_geo_trains_alone_for_k_steps_and_settles_what_is_left() -> None:
    """Two trainers, seven steps: exchanges after 3, 6, and at the end, by when nothing is lost."""
    pushed: list[tuple[int, int]] = []

    def body(rank: int) -> tuple[FloatArray, FloatArray]:
        with synchronizer_for(Client(addresses(group), rank, 2, mode=GEO)) as synchronizer:
            assert isinstance(synchronizer, GeoSynchronizer)
            layout = geo_layout()
            buckets = plan_buckets([s.start for s in layout.slots], layout.length, first_bytes=64, bucket_bytes=256)
            arena = Arena(layout, buckets=buckets, empty=synchronizer.empty)
            arena.parameters[...] = 1 - rank
            synchronizer.attach(arena, SGD())
            assert (synchronizer.mode, synchronizer.staleness) == ("geo:3", None)
            alone = arena.parameters.copy()
            for step in range(7):
                arena.gradients[...] = rank * 4 + step
                for bucket in range(len(arena.buckets)):
                    synchronizer.mark_ready(bucket)
                synchronizer.finish(0.5)
                pushed.append((rank, synchronizer._client.step))
                if step == 1:
                    alone = arena.parameters.copy()
            synchronizer.settle()
            return alone, arena.parameters.copy()

    with serving(2) as group:
        results = on_threads(2, body)
    for rank in (0, 1):
        assert [step for r, step in pushed if r == rank] == [0, 0, 1, 1, 1, 2, 2]
        alone, final = results[rank]
        np.testing.assert_array_equal(alone, np.full_like(alone, 1 - 0.5 * (rank * 8 + 1)))
        moved = sum(0.5 * (r * 4 + step) for r in (0, 1) for step in range(7))
        np.testing.assert_array_equal(final, np.full_like(final, 1 - moved / 2))


def test_in_step_modes_need_no_settling() -> None:
    with serving(1) as (server,), ServerSynchronizer(Client([server.address], 0, 1)) as synchronizer:
        synchronizer.attach(Arena(geo_layout()), None)
        synchronizer.settle()
        assert (synchronizer.mode, synchronizer.staleness) == ("sync", 0)
