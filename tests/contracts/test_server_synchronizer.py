"""The parameter-server synchronizer: the contract of all synchronizers, and the bits of the ring with Paddle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

pytest.importorskip("paddle")

from collective.synchronizer import RingSynchronizer
from common.errors import LayoutMismatch, ProtocolError, UsageError
from common.network import rpc
from common.sync.synchronizer import Synchronizer
from common.tensors.arena import Arena, FloatArray, Layout
from common.tensors.buckets import plan_buckets
from common.tensors.flat_optimizer import PartOptimizer
from common.tensors.optimizers import SGD, Adam, Momentum, Optimizer, RMSProp
from common.tensors.updater import PADDING, is_number, parts_of
from ps.client.session import Client
from ps.coordinator.servicer import ParameterServer
from ps.store.modes import SYNC, Mode
from ps.synchronizer import ServerSynchronizer, synchronizer_for
from tests.support.groups import mesh_groups, on_threads, outcomes_of, reduced, sample
from tests.support.synchronizer_contract import (
    BETWEEN_RANKS,
    CHECKS,
    Check,
    Make,
    check_overlap_changes_no_bits,
    name_of,
)

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

BETWEEN = [(2, 1, "grpc"), (2, 2, "shm"), (3, 1, "mixed"), (3, 2, "grpc"), (3, 2, "shm")]
everywhere = pytest.mark.parametrize(
    ("nranks", "servers", "plane"), [(1, 1, "grpc"), (1, 2, "grpc"), (1, 1, "shm"), *BETWEEN]
)
between_ranks = pytest.mark.parametrize(("nranks", "servers", "plane"), BETWEEN)


@contextmanager
def job(nranks: int, servers: int, plane: str, *, overlap: bool = True, mode: Mode = SYNC) -> Iterator[Make]:
    """Data plane "mixed": rank 1 has none but grpc; "priority": grpc, the front first."""
    of_rank = {"mixed": ("shm", "grpc", "shm"), "priority": ("grpc",) * 3}.get(plane, (plane,) * 3)

    def make(rank: int, nranks: int) -> ServerSynchronizer:
        client = Client(addresses, rank, nranks, data_plane=of_rank[rank], mode=mode, priority=plane == "priority")
        return synchronizer_for(client, overlap=overlap)

    with serving(nranks, servers) as addresses:
        yield make


@everywhere
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_contract(check: Check, nranks: int, servers: int, plane: str) -> None:
    with job(nranks, servers, plane) as make:
        check(make, nranks)


@between_ranks
@pytest.mark.parametrize("check", [*CHECKS, *BETWEEN_RANKS], ids=name_of)
def test_contract_under_ssp_with_a_bound_of_zero(check: Check, nranks: int, servers: int, plane: str) -> None:
    if check.__name__ == "check_without_an_optimizer_gradients_become_their_mean":
        pytest.skip("mode ssp needs the optimizer when the training begins")
    with job(nranks, servers, plane, mode=Mode("ssp", 0)) as make:
        check(make, nranks)


@between_ranks
@pytest.mark.parametrize("check", BETWEEN_RANKS, ids=name_of)
def test_contract_between_ranks(check: Check, nranks: int, servers: int, plane: str) -> None:
    with job(nranks, servers, plane) as make:
        check(make, nranks)


@pytest.mark.parametrize("check", [*CHECKS, *BETWEEN_RANKS], ids=name_of)
def test_contract_with_priority(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.coordinator.training_group.PIECE", 1024)
    with job(2, 2, "priority") as make:
        check(make, 2)


@everywhere
def test_overlap_changes_no_bits(nranks: int, servers: int, plane: str) -> None:
    with job(nranks, servers, plane) as overlapping, job(nranks, servers, plane, overlap=False) as waiting:
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
            if step:  # the first one as by those that know it only at the end
                synchronizer.announce(optimizer.learning_rate / (1 + step))
            arena.gradients.fill(0)
            for slot in arena.layout.slots:
                arena.gradients[slot.start : slot.stop] = sample(synchronizer.rank, slot.size, "float32", seed=step)
            for bucket in reversed(range(len(arena.buckets))):
                synchronizer.mark_final(bucket)
            synchronizer.commit(optimizer.learning_rate / (1 + step))
            synchronizer.wait_for(0, arena.layout.length)
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


@pytest.mark.parametrize(
    ("nranks", "servers", "plane"), [(1, 1, "grpc"), (1, 2, "grpc"), (1, 1, "shm"), *BETWEEN, (3, 2, "priority")]
)
@pytest.mark.parametrize("mode", [SYNC, Mode("ssp", 0)], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_servers_and_ring_give_the_same_bits(
    optimizer: Optimizer, mode: Mode, nranks: int, servers: int, plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps.coordinator.training_group.PIECE", 32)
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


# Updates by servers

SHAPES_BY_NAME = [("a.weight", (7, 11)), ("a.bias", (33,)), ("b", (5, 3, 3))]
USED = Layout.of([("used", (5,))])
LAYOUTS = {
    "float32": USED.then(SHAPES_BY_NAME, "float32"),
    "float64": USED.then(SHAPES_BY_NAME, "float64"),
    "mixed": USED.then(SHAPES_BY_NAME[:2], "float32").then(SHAPES_BY_NAME[2:], "float64"),
}
NAMES = ["", "a.weight", "a.bias", "b"]
ADAM = Adam(beta1=0.8, weight_decay=0.1)
in_parts = pytest.mark.parametrize(("nranks", "servers"), [(1, 1), (2, 1), (2, 2), (2, 3), (3, 2)])


def flat_values(rank: int, seed: int, layout: Layout) -> FloatArray:
    """Values that differ by rank in every slot, in its type; zero between them."""
    arena = Arena(layout)
    for slot in layout.slots:
        arena.parameter(slot)[...] = sample(rank, slot.shape, slot.dtype, seed=seed) / 100
    return arena.parameters


def arena_on(layout: Layout, rank: int) -> Arena:
    arena = Arena(layout, buckets=layout.plan(first_bytes=128, bucket_bytes=256))
    arena.parameters[...] = flat_values(rank, 50, layout)
    return arena


class Alone:
    """What all ranks must have: Paddle's optimizer on the canonical mean, in one process."""

    def __init__(self, nranks: int, layout: Layout) -> None:
        self.nranks, self.layout, arena = nranks, layout, arena_on(layout, 0)
        self.padded = [np.zeros(layout.length + PADDING, np.float32) for _ in range(2)]
        self.parameters, self.gradients = (array[: layout.length] for array in self.padded)
        self.parameters[...] = arena.parameters
        self.optimizer = PartOptimizer(ADAM, *self.padded, parts_of(layout, NAMES, 0, layout.length))

    def update(self, step: int, rate: float, used: bytes = b"\1\1\1\1") -> None:
        self.gradients[...] = mean_of(self.layout, self.nranks, step)
        self.optimizer.step(rate, used)

    def state(self) -> dict[str, bytes]:
        return {each.key: each.values.tobytes() for each in self.optimizer.state()}


def mean_of(layout: Layout, nranks: int, step: int) -> FloatArray:
    flats = [flat_values(rank, step, layout) for rank in range(nranks)]
    out = np.zeros_like(flats[0])
    for b in arena_on(layout, 0).buckets:
        part = slice(b.start, b.stop)
        out[part].view(b.dtype)[...] = reduced([flat[part].view(b.dtype) for flat in flats], "mean")
    return out


def bits_of(state: dict[str, Any]) -> dict[str, bytes]:
    return {key: np.ascontiguousarray(values).tobytes() for key, values in state.items()}


def give_gradients(synchronizer: Synchronizer, arena: Arena, step: int) -> None:
    arena.gradients[...] = flat_values(synchronizer.rank, step, arena.layout)
    for bucket in range(len(arena.buckets) - step % 2):  # or all but the last, which the end of the step takes
        synchronizer.mark_final(bucket)


@in_parts
@pytest.mark.parametrize("dtype", LAYOUTS)
def test_gradients_of_any_dtypes_are_averaged_in_their_own(dtype: str, nranks: int, servers: int) -> None:
    def body(synchronizer: ServerSynchronizer, arena: Arena) -> list[bytes]:
        seen = []
        for step in range(3):
            give_gradients(synchronizer, arena, step)
            synchronizer.finish(0.0)
            seen.append(arena.gradients.tobytes())
        return [*seen, arena.parameters.tobytes()]

    layout = LAYOUTS[dtype]
    expected = [*(mean_of(layout, nranks, step) for step in range(3)), flat_values(0, 50, layout)]
    for seen in on_ranks(nranks, servers, body, layout=layout):
        assert seen == [flat.tobytes() for flat in expected]


@in_parts
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_users_life_by_servers_equals_one_process(dtype: str, nranks: int, servers: int) -> None:
    """Average first, then updates with averages between them, parts unused, parameters and state replaced."""
    layout = LAYOUTS[dtype]
    one, seen = Alone(nranks, layout), on_ranks(nranks, servers, a_users_life, layout=layout)

    def all_have(what: str, expected: Any) -> None:
        for rank, history in enumerate(seen):
            assert history[what] == expected, f"{what} of rank {rank}"

    all_have("averaged", mean_of(layout, nranks, 0).tobytes())
    one.update(0, 0.01)
    all_have("used again", one.parameters.tobytes())
    one.update(1, 0.02, b"\0\1\0\1" if nranks > 1 else b"\0\1\0\0")
    all_have("partly used", one.parameters.tobytes())
    all_have("state", one.state())
    saved = one.optimizer.state()
    assert seen[0]["keys"] == [each.key for each in saved]
    assert seen[0]["shapes"] == {
        each.key: () if is_number(each.key) else layout.slots[each.slot].shape for each in saved
    }
    one.update(2, 0.03)
    one.update(3, 0.03)
    all_have("two more", one.parameters.tobytes())
    one.parameters[...] = flat_values(0, 60, layout)
    one.optimizer.load(saved)
    one.update(4, 0.01)
    all_have("replaced", one.parameters.tobytes())
    all_have("replaced state", one.state())
    one.update(5, 0.01)
    all_have("last", one.parameters.tobytes())


def a_users_life(synchronizer: ServerSynchronizer, arena: Arena) -> dict[str, Any]:
    rank, seen, whole = synchronizer.rank, {}, b"\1\1\1\1"
    give_gradients(synchronizer, arena, 0)
    synchronizer.finish(0.0)
    seen["averaged"] = arena.gradients.tobytes()
    synchronizer.configure(ADAM, NAMES)
    assert rank or synchronizer.optimizer_state() == {}
    synchronizer.update(0.01, used=whole, again=True)
    seen["used again"] = arena.parameters.tobytes()
    give_gradients(synchronizer, arena, 1)
    synchronizer.update(0.02, used=b"\0\1\0\0" if rank == 0 else b"\0\0\0\1")
    seen["partly used"] = arena.parameters.tobytes()
    saved = synchronizer.optimizer_state()
    seen["state"], seen["keys"] = bits_of(saved), list(saved)
    seen["shapes"] = {key: () if is_number(key) else values.shape for key, values in saved.items()}
    for step in (2, 3):
        give_gradients(synchronizer, arena, step)
        synchronizer.update(0.03, used=whole)
    seen["two more"] = arena.parameters.tobytes()
    arena.parameters[...] = flat_values(rank, 60, arena.layout)  # rank 0's count, as of the state
    synchronizer.load_optimizer_state({key: values + np.asarray(rank, values.dtype) for key, values in saved.items()})
    give_gradients(synchronizer, arena, 4)
    synchronizer.update(0.01, used=whole, replaced=True)
    seen["replaced"] = arena.parameters.tobytes()
    seen["replaced state"] = bits_of(synchronizer.optimizer_state()) if rank == synchronizer.nranks - 1 else None
    synchronizer.all_gather(np.zeros(1))
    if seen["replaced state"] is None:  # the others ask later, between other steps
        seen["replaced state"] = bits_of(synchronizer.optimizer_state())
    give_gradients(synchronizer, arena, 5)
    synchronizer.update(0.01, used=whole)
    seen["last"] = arena.parameters.tobytes()
    return seen


def on_ranks(
    nranks: int,
    servers: int,
    body: Callable[[ServerSynchronizer, Arena], Any],
    *,
    layout: Layout = LAYOUTS["float32"],
    errors: bool = False,
) -> list[Any]:
    """What `body` returned on each rank, or what it raised."""

    def on_rank(rank: int) -> Any:
        arena = arena_on(layout, rank)
        with make(rank, nranks) as synchronizer:
            synchronizer.attach(arena, None)
            return body(synchronizer, arena)

    with job(nranks, servers, "shm" if servers == 1 else "mixed") as make:
        return [o.error for o in outcomes_of(nranks, on_rank)] if errors else on_threads(nranks, on_rank)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_state_of_many_messages_comes_and_goes(servers: int) -> None:
    """3 MB of moments; a second optimizer's servers go on from them."""
    layout = Layout.of([("w", (400_003,))])
    values = {"w_velocity_0": sample(0, (400_003,), "float32", seed=9)}

    def body(rank: int) -> Any:
        arena = Arena(layout)
        with make(rank, 2) as synchronizer:
            synchronizer.attach(arena, None)
            synchronizer.configure(Momentum(momentum=0.5), ["w"])
            synchronizer.load_optimizer_state(values)
            arena.gradients.fill(0)
            synchronizer.update(1.0, used=b"\1")
            return arena.parameters.copy(), synchronizer.optimizer_state()

    with job(2, servers, "shm" if servers == 1 else "mixed") as make:
        results = on_threads(2, body)
    half = values["w_velocity_0"] / np.float32(2)
    for parameters, state in results:
        assert parameters[:400_003].tobytes() == (-half).tobytes()
        assert not parameters[400_003:].any()
        assert {key: v.tobytes() for key, v in state.items()} == {"w_velocity_0": half.tobytes()}


WRONG_STATES = {
    "foreign": ({"other_moment1_0": np.zeros(3, np.float32)}, "has other_moment1_0, which belongs to no parameter"),
    "size": ({"a.bias_moment1_0": np.zeros(34, np.float32)}, "a.bias_moment1_0 has 34 elements, its parameter 33"),
}


@pytest.mark.parametrize("name", WRONG_STATES)
def test_a_state_of_another_model_is_refused_on_every_rank(name: str) -> None:
    state, text = WRONG_STATES[name]

    def body(synchronizer: ServerSynchronizer, arena: Arena) -> None:
        synchronizer.configure(ADAM, NAMES)
        with pytest.raises(UsageError, match=f"^the optimizer state('s)? ?.*{text}"):
            synchronizer.load_optimizer_state(state)
        synchronizer.all_gather(np.zeros(1))  # nothing was sent, and the group goes on

    on_ranks(2, 2, body)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_state_that_lacks_something_fails_all_with_a_usage_error(servers: int) -> None:
    def body(synchronizer: ServerSynchronizer, arena: Arena) -> None:
        synchronizer.configure(ADAM, NAMES)
        give_gradients(synchronizer, arena, 0)
        synchronizer.update(0.1, used=b"\1\1\1\1")
        state = synchronizer.optimizer_state()
        del state["b_moment2_0"]
        synchronizer.load_optimizer_state(state)
        give_gradients(synchronizer, arena, 1)
        synchronizer.update(0.1, used=b"\1\1\1\1")

    for error in on_ranks(2, servers, body, errors=True):
        assert "the optimizer state does not fit the optimizer" in str(error)
        assert "b_moment2_0 not found" in str(error)


def test_a_state_that_lacks_something_at_the_first_update_fails_all_with_a_usage_error() -> None:
    """As one of another kind of optimizer does, in a program that resumes."""

    def body(synchronizer: ServerSynchronizer, arena: Arena) -> None:
        synchronizer.configure(ADAM, NAMES)
        synchronizer.load_optimizer_state({"b_velocity_0": np.zeros(45, np.float32)})
        give_gradients(synchronizer, arena, 0)
        synchronizer.update(0.1, used=b"\1\1\1\1")

    for error in on_ranks(2, 1, body, errors=True):
        assert type(error) is UsageError
        assert "the optimizer state does not fit the optimizer" in str(error)


def test_a_state_asked_for_before_there_is_an_optimizer_is_an_error_not_a_wait() -> None:
    def body(synchronizer: ServerSynchronizer, arena: Arena) -> None:
        synchronizer.optimizer_state()

    for error in on_ranks(2, 2, body, errors=True):
        assert isinstance(error, ProtocolError)
        assert "asked for optimizer state at step 0, but there is no optimizer" in str(error)


DIFFERENCES: dict[str, tuple[Callable[[ServerSynchronizer, Arena], object], str]] = {
    "optimizer": (
        lambda s, a: s.configure([SGD(), RMSProp()][s.rank], NAMES) or end_step(s, a),
        "disagree on the optimizer",
    ),
    "names": (
        lambda s, a: s.configure(ADAM, ["", "a.weight", "a.bias", f"b{s.rank}"]) or end_step(s, a),
        "other parameter names",
    ),
    "end": (lambda s, a: s.configure(ADAM, NAMES) or (end_step(s, a) if s.rank else s.finish(0.0)), "all ranks must"),
    "replaced": (lambda s, a: s.configure(ADAM, NAMES) or end_step(s, a, replaced=s.rank == 0), "load the same state"),
    "rate": (lambda s, a: s.configure(ADAM, NAMES) or end_step(s, a, rate=1.0 + s.rank), "the same --lr"),
}


def end_step(synchronizer: ServerSynchronizer, arena: Arena, *, rate: float = 1.0, replaced: bool = False) -> None:
    give_gradients(synchronizer, arena, 0)
    synchronizer.update(rate, used=b"\1\1\1\1", replaced=replaced)


@pytest.mark.parametrize("name", DIFFERENCES)
@pytest.mark.parametrize("servers", [1, 3])
def test_ranks_that_differ_are_told(name: str, servers: int) -> None:
    body, text = DIFFERENCES[name]
    errors = on_ranks(2, servers, body, errors=True)
    assert any(isinstance(error, LayoutMismatch) for error in errors), errors
    assert all(error and text in str(error) for error in errors), errors


# When buckets are pushed, seen by a client that only takes notes


class NotingClient:
    rank, nranks, servers, data_plane, mode, in_slices = 0, 1, ("nowhere:1",), "none", SYNC, False

    def __init__(self) -> None:
        self.notes: list[object] = []

    def register(self, arena: Arena, optimizer: Optimizer) -> None:
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
        synchronizer.mark_final(bucket)
        assert client.notes == pushed
    synchronizer.finish(0.5)
    assert client.notes == [0, 1, 2, ("commit", 0.5)]


def test_without_overlap_buckets_are_pushed_at_the_end() -> None:
    client, synchronizer = noted(overlap=False)
    synchronizer.announce(0.5)
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
    _, synchronizer = noted(overlap=True)
    assert (synchronizer.scheme, synchronizer.backend) == ("ps", "none")
    assert (synchronizer.rank, synchronizer.nranks, synchronizer.servers) == (0, 1, 1)
