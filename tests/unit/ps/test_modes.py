"""Modes ssp, async and geo between real clients and servers: whole versions, nothing lost, nobody held up in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from common.errors import LayoutMismatch, PeerLost, PeerStalled, ProtocolError, UsageError
from common.system.memory import aligned_empty
from common.tensors.arena import Arena, FloatArray, Layout
from common.tensors.buckets import plan_buckets
from common.tensors.optimizers import SGD, Optimizer
from ps.client.session import Client
from ps.config import RunConfig, TrainerConfig
from ps.coordinator.servicer import ParameterServer
from ps.store.modes import ASYNC, SYNC, Mode, parse_mode
from ps.synchronizer import GeoSynchronizer, ServerSynchronizer, synchronizer_for
from tests.support.groups import on_threads
from tests.unit.ps.test_client import (
    _nothing_left,  # noqa: F401 - a fixture
    _without_paddle,  # noqa: F401 - a fixture
    addresses,
    assert_all,
    errors_of,
    expected_after,
    failure_of,
    make_arena,
    planes,
    serving,
    take_step,
)

SSP, GEO = Mode("ssp", 2), Mode("geo", 3)
RELAXED = [SSP, ASYNC, GEO]
Planes = Sequence[tuple[str, bool]]
relaxed = pytest.mark.parametrize("mode", RELAXED, ids=str)


# ---- names and flags --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mode", "staleness"),
    [
        ("sync", Mode("sync"), 0),
        ("ssp", Mode("ssp", 2), 2),
        ("ssp:0", Mode("ssp", 0), 0),
        ("ssp:7", Mode("ssp", 7), 7),
        ("async", Mode("async"), None),
        ("geo", Mode("geo", 4), None),
        ("geo:1", Mode("geo", 1), None),
    ],
)
def test_modes_have_names_and_numbers(text: str, mode: Mode, staleness: int | None) -> None:
    assert parse_mode(text) == mode == parse_mode(str(mode))
    assert (mode.staleness, mode.in_step) == (staleness, text in ("sync", "ssp:0"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("asink", r"unknown mode 'asink'; did you mean 'async'\? \(known: sync, ssp, async, geo\)"),
        ("sync:1", "not a mode: 'sync:1'; expected sync, ssp:S, async or geo:K, as in ssp:2"),
        ("ssp:-1", "not a mode: 'ssp:-1'"),
        ("ssp:1001", r"--staleness must be in 0\.\.1000 \(got 1001\)"),
        ("geo:0", r"--local-steps must be in 1\.\.1000000000 \(got 0\)"),
    ],
)
def test_what_is_no_mode_is_said_so(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        parse_mode(text)


@pytest.mark.parametrize("kind", [TrainerConfig, RunConfig])
def test_flags_make_a_mode(kind: Callable[..., TrainerConfig | RunConfig]) -> None:
    assert kind().consistency == SYNC
    assert kind(mode="ssp").consistency == SSP
    assert kind(mode="ssp", staleness=0).consistency == Mode("ssp", 0)
    assert kind(mode="async").consistency == ASYNC
    assert kind(mode="geo", local_steps=9).consistency == Mode("geo", 9)
    for flags, text in (
        ({"mode": "sps"}, "unknown mode 'sps'; did you mean 'ssp'"),
        ({"staleness": 1}, r"^--staleness is for --mode ssp \(got --mode sync\)$"),
        ({"mode": "ssp", "local_steps": 1}, r"^--local-steps is for --mode geo \(got --mode ssp\)$"),
        ({"mode": "geo", "local_steps": 0}, "^--local-steps must be in 1"),
        ({"mode": "ssp", "staleness": -1}, "^--staleness must be in 0"),
        ({"mode": "async", "priority": True}, r"^--priority is for --mode sync \(got --mode async\)$"),
    ):
        with pytest.raises(UsageError, match=text):
            kind(**flags)


def test_a_script_is_trained_in_sync_mode_only() -> None:
    RunConfig().check_script(["train.py"])
    RunConfig(mode="async").check_script([])
    text = "^--mode async is for the built-in trainer so far; train.py can be trained in mode sync only$"
    with pytest.raises(UsageError, match=text):
        RunConfig(mode="async").check_script(["train.py"])
    with pytest.raises(UsageError, match=r"^--priority is for the built-in trainer; leave it out for train\.py$"):
        RunConfig(priority=True).check_script(["train.py"])


# ---- what trainers read and what servers apply ------------------------------------------------------------------


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


@planes
@pytest.mark.parametrize("servers", [1, 2])
def test_ssp_with_a_bound_of_zero_gives_numpys_bits(servers: int, planes: Planes) -> None:
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

    def __init__(
        self, optimizer: Optimizer | None, parameters: FloatArray, gradients: FloatArray, *, helper: Any = None
    ) -> None:
        self.parameters = parameters

    def step(self, learning_rate: float, used: bytes = b"") -> None:
        middle = self.parameters.size // 2
        self.parameters[:middle] += 1
        self.parameters[middle:] += 1


@planes
@pytest.mark.parametrize("mode", [Mode("ssp", 0), Mode("ssp", 1), Mode("ssp", 3), ASYNC], ids=str)
def test_a_trainer_reads_whole_versions_within_the_bound(
    monkeypatch: pytest.MonkeyPatch, mode: Mode, planes: Planes
) -> None:
    """Of each slice; large enough to be sent in several pieces."""
    monkeypatch.setattr("ps.coordinator.training_group.make_updater", Counter)
    steps, shapes = 12, [("w", (300_000,)), ("v", (333, 1000))]

    def body(client: Client, arena: Arena) -> list[tuple[float, float]]:
        def versions() -> list[float]:
            found = [arena.parameters[s.shard.start : s.shard.stop] for s in client._sessions]
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


@planes
@relaxed
@pytest.mark.parametrize("servers", [1, 2])
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


class LocalSGD:
    def __init__(self, optimizer: Optimizer | None, parameters: FloatArray, gradients: FloatArray) -> None:
        self.parameters, self.gradients = parameters, gradients

    def step(self, learning_rate: float, used: bytes = b"") -> None:
        self.parameters -= np.float32(learning_rate) * self.gradients


def geo_layout() -> Layout:
    return Layout.of([("a", (33, 5)), ("b", (7,))])


def test_geo_trains_alone_for_k_steps_and_settles_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trainers, seven steps: exchanges after 3, 6, and at the end, by when nothing is lost."""
    monkeypatch.setattr("ps.synchronizer.make_updater", LocalSGD)
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
                    synchronizer.mark_final(bucket)
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


# ---- who waits for whom -----------------------------------------------------------------------------------------


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
            store = server._group._store
            wait_until(lambda: store.waiting == {0})  # type: ignore[union-attr]
            assert done == [0, 1]
            assert store.steps == [3, 0]  # type: ignore[union-attr]
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
            group = server._group
            for step in range(2):
                if (rank, step) == (2, 1):
                    wait_until(lambda: group._store.steps == [2, 2, 1])  # type: ignore[union-attr]
                    wait_until(lambda: 0 in group._gone)
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
                for session in client._sessions:
                    session._call.cancel()  # what the kernel does to a dead process's connections
            try:
                client._wait(lambda session: False, "watching")
            finally:
                heard.append(time.monotonic())

    with serving(3, servers) as group:
        errors = errors_of(3, body)
        survivors = [errors[0], errors[2], *map(failure_of, group)]
        assert_all(survivors, PeerLost, "rank 1 died at step 1: its connection closed without a goodbye")
    assert max(heard) - vanished[0] < 1.0


def test_geo_notices_at_its_next_step_however_long_it_trains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.synchronizer.make_updater", LocalSGD)

    def body(rank: int) -> None:
        client = Client([server.address], rank, 2, mode=Mode("geo", 10**9))
        with synchronizer_for(client) as synchronizer:
            arena = Arena(geo_layout(), empty=synchronizer.empty)
            synchronizer.attach(arena, SGD())
            if rank == 1:
                client._sessions[0]._call.cancel()
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


@pytest.mark.parametrize("mode", [ASYNC, GEO], ids=str)
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


# ---- who does not agree -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modes", "text"),
    [
        ([SSP, ASYNC], "--mode ssp:2 against async"),
        ([SYNC, GEO], "--mode sync against geo:3"),
        ([SSP, Mode("ssp", 3)], "--mode ssp:2 against ssp:3"),
    ],
)
def test_all_must_ask_for_the_same_mode(modes: list[Mode], text: str) -> None:
    def on_rank(rank: int) -> None:
        with Client([server.address], rank, 2, mode=modes[rank]) as client:
            client.register(make_arena(rank), SGD())

    with serving(2) as (server,):
        errors = [*errors_of(2, on_rank), failure_of(server)]
    for error in errors:
        assert isinstance(error, LayoutMismatch)
        both = [text, " against ".join(reversed(text.removeprefix("--mode ").split(" against ")))]
        assert any(f"disagree: {'' if each == text else '--mode '}{each}; give all" in str(error) for each in both)


@relaxed
def test_other_modes_need_the_optimizer(mode: Mode) -> None:
    text = f"^mode {mode} needs the optimizer when the training begins; use mode sync$"
    with serving(1) as (server,), Client([server.address], 0, 1, mode=mode) as client:
        arena = make_arena(0)
        with pytest.raises(UsageError, match=text):
            client.register(arena, None)


@relaxed
def test_averages_are_for_sync_mode(mode: Mode) -> None:
    def body(rank: int) -> None:
        with Client([server.address], rank, 1, mode=mode) as client:
            client.register(arena := make_arena(rank), SGD())
            for bucket in range(len(arena.buckets)):
                client.push(bucket)
            client.average()

    with serving(1) as (server,):
        (error,) = errors_of(1, body)
    assert isinstance(error, ProtocolError)
    assert str(error) == "rank 0 asked for more than an update at step 0, which only sync mode has"


@pytest.mark.parametrize(
    ("mode", "step", "text"),
    [
        (SYNC, 0, "rank 0 asked for parameters at step 0, which come unasked in sync mode"),
        (ASYNC, 1, "rank 0 sent step 1, it is at step 0"),
    ],
)
def test_a_pull_out_of_turn_is_refused(mode: Mode, step: int, text: str) -> None:
    def body(rank: int) -> None:
        with Client([server.address], rank, 1, mode=mode) as client:
            client.register(make_arena(rank), SGD())
            client.step = step
            client.pull()

    with serving(1) as (server,):
        (error,) = errors_of(1, body)
    assert isinstance(error, ProtocolError)
    assert str(error) == text
