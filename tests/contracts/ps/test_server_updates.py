"""Updates by servers: the life of a user's program, its optimizer's state, ranks that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

from common.errors import LayoutMismatch, ProtocolError, UsageError
from common.sync.synchronizer import Synchronizer
from common.tensors.arena import Arena, FloatArray, Layout
from common.tensors.flat_optimizer import PartOptimizer
from common.tensors.optimizers import SGD, Adam, Momentum, Optimizer, RMSProp
from common.tensors.parts import PADDING, is_number, parts_of
from ps.synchronizer import ServerSynchronizer
from tests.support.groups import on_threads, outcomes_of, reduced, sample
from tests.support.server_jobs import job

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

    def __init__(self, nranks: int, layout: Layout, optimizer: Optimizer = ADAM) -> None:
        self.nranks, self.layout, arena = nranks, layout, arena_on(layout, 0)
        self.padded = [np.zeros(layout.length + PADDING, np.float32) for _ in range(2)]
        self.parameters, self.gradients = (array[: layout.length] for array in self.padded)
        self.parameters[...] = arena.parameters
        self.optimizer = PartOptimizer(optimizer, *self.padded, parts_of(layout, NAMES, 0, layout.length))

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
        synchronizer.mark_ready(bucket)


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
    synchronizer.server_optimizer.configure(ADAM, NAMES)
    assert rank or synchronizer.server_optimizer.state() == {}
    synchronizer.server_optimizer.update(0.01, used=whole, again=True)
    seen["used again"] = arena.parameters.tobytes()
    give_gradients(synchronizer, arena, 1)
    synchronizer.server_optimizer.update(0.02, used=b"\0\1\0\0" if rank == 0 else b"\0\0\0\1")
    seen["partly used"] = arena.parameters.tobytes()
    saved = synchronizer.server_optimizer.state()
    seen["state"], seen["keys"] = bits_of(saved), list(saved)
    seen["shapes"] = {key: () if is_number(key) else values.shape for key, values in saved.items()}
    for step in (2, 3):
        give_gradients(synchronizer, arena, step)
        synchronizer.server_optimizer.update(0.03, used=whole)
    seen["two more"] = arena.parameters.tobytes()
    arena.parameters[...] = flat_values(rank, 60, arena.layout)  # rank 0's count, as of the state
    synchronizer.server_optimizer.load({key: values + np.asarray(rank, values.dtype) for key, values in saved.items()})
    give_gradients(synchronizer, arena, 4)
    synchronizer.server_optimizer.update(0.01, used=whole, replaced=True)
    seen["replaced"] = arena.parameters.tobytes()
    seen["replaced state"] = bits_of(synchronizer.server_optimizer.state()) if rank == synchronizer.nranks - 1 else None
    synchronizer.all_gather(np.zeros(1))
    if seen["replaced state"] is None:  # the others ask later, between other steps
        seen["replaced state"] = bits_of(synchronizer.server_optimizer.state())
    give_gradients(synchronizer, arena, 5)
    synchronizer.server_optimizer.update(0.01, used=whole)
    seen["last"] = arena.parameters.tobytes()
    return seen


@pytest.mark.parametrize(("nranks", "servers"), [(1, 1), (2, 2)])
def test_each_model_has_an_optimizer_of_its_own(nranks: int, servers: int) -> None:
    """They take turns in training, as a generator and a discriminator do; the second is named when the first has
    trained, and its gradients are those of other steps."""
    optimizers = [ADAM, Momentum(momentum=0.5)]

    def body(synchronizer: ServerSynchronizer, arena: Arena) -> list[tuple[bytes, dict[str, bytes]]]:
        second, other = synchronizer.another(), arena_on(arena.layout, synchronizer.rank)
        second.attach(other, None)
        assert second.server_optimizer.choice == synchronizer.server_optimizer.choice
        pairs = [(synchronizer, arena), (second, other)]
        for turn in range(2):
            for number, (each, own) in enumerate(pairs):
                if not turn:
                    each.server_optimizer.configure(optimizers[number], NAMES)
                give_gradients(each, own, 2 * turn + number)
                each.server_optimizer.update(0.01 / (1 + number), used=b"\1\1\1\1")
        return [(own.parameters.tobytes(), bits_of(each.server_optimizer.state())) for each, own in pairs]

    expected = []
    for number, optimizer in enumerate(optimizers):
        alone = Alone(nranks, LAYOUTS["float32"], optimizer)
        for turn in range(2):
            alone.update(2 * turn + number, 0.01 / (1 + number))
        expected.append((alone.parameters.tobytes(), alone.state()))
    for found in on_ranks(nranks, servers, body):
        assert found == expected


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
            synchronizer.server_optimizer.configure(Momentum(momentum=0.5), ["w"])
            synchronizer.server_optimizer.load(values)
            arena.gradients.fill(0)
            synchronizer.server_optimizer.update(1.0, used=b"\1")
            return arena.parameters.copy(), synchronizer.server_optimizer.state()

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
        synchronizer.server_optimizer.configure(ADAM, NAMES)
        with pytest.raises(UsageError, match=f"^the optimizer state('s)? ?.*{text}"):
            synchronizer.server_optimizer.load(state)
        synchronizer.all_gather(np.zeros(1))  # nothing was sent, and the group goes on

    on_ranks(2, 2, body)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_state_that_lacks_something_fails_all_with_a_usage_error(servers: int) -> None:
    def body(synchronizer: ServerSynchronizer, arena: Arena) -> None:
        synchronizer.server_optimizer.configure(ADAM, NAMES)
        give_gradients(synchronizer, arena, 0)
        synchronizer.server_optimizer.update(0.1, used=b"\1\1\1\1")
        state = synchronizer.server_optimizer.state()
        del state["b_moment2_0"]
        synchronizer.server_optimizer.load(state)
        give_gradients(synchronizer, arena, 1)
        synchronizer.server_optimizer.update(0.1, used=b"\1\1\1\1")

    for error in on_ranks(2, servers, body, errors=True):
        assert "the optimizer state does not fit the optimizer" in str(error)
        assert "b_moment2_0 not found" in str(error)


def test_a_state_that_lacks_something_at_the_first_update_fails_all_with_a_usage_error() -> None:
    """As one of another kind of optimizer does, in a program that resumes."""

    def body(synchronizer: ServerSynchronizer, arena: Arena) -> None:
        synchronizer.server_optimizer.configure(ADAM, NAMES)
        synchronizer.server_optimizer.load({"b_velocity_0": np.zeros(45, np.float32)})
        give_gradients(synchronizer, arena, 0)
        synchronizer.server_optimizer.update(0.1, used=b"\1\1\1\1")

    for error in on_ranks(2, 1, body, errors=True):
        assert type(error) is UsageError
        assert "the optimizer state does not fit the optimizer" in str(error)


def test_a_state_asked_for_before_there_is_an_optimizer_is_an_error_not_a_wait() -> None:
    def body(synchronizer: ServerSynchronizer, arena: Arena) -> None:
        synchronizer.server_optimizer.state()

    for error in on_ranks(2, 2, body, errors=True):
        assert isinstance(error, ProtocolError)
        assert "asked for optimizer state at step 0, but there is no optimizer" in str(error)


DIFFERENCES: dict[str, tuple[Callable[[ServerSynchronizer, Arena], object], str]] = {
    "optimizer": (
        lambda s, a: s.server_optimizer.configure([SGD(), RMSProp()][s.rank], NAMES) or end_step(s, a),
        "disagree on the optimizer",
    ),
    "names": (
        lambda s, a: s.server_optimizer.configure(ADAM, ["", "a.weight", "a.bias", f"b{s.rank}"]) or end_step(s, a),
        "other parameter names",
    ),
    "end": (
        lambda s, a: s.server_optimizer.configure(ADAM, NAMES) or (end_step(s, a) if s.rank else s.finish(0.0)),
        "all ranks must",
    ),
    "replaced": (
        lambda s, a: s.server_optimizer.configure(ADAM, NAMES) or end_step(s, a, replaced=s.rank == 0),
        "load the same state",
    ),
    "rate": (
        lambda s, a: s.server_optimizer.configure(ADAM, NAMES) or end_step(s, a, rate=1.0 + s.rank),
        "give all trainers the same learning rate and scheduler",
    ),
}


def end_step(synchronizer: ServerSynchronizer, arena: Arena, *, rate: float = 1.0, replaced: bool = False) -> None:
    give_gradients(synchronizer, arena, 0)
    synchronizer.server_optimizer.update(rate, used=b"\1\1\1\1", replaced=replaced)


@pytest.mark.parametrize("name", DIFFERENCES)
@pytest.mark.parametrize("servers", [1, 3])
def test_ranks_that_differ_are_told(name: str, servers: int) -> None:
    body, text = DIFFERENCES[name]
    errors = on_ranks(2, servers, body, errors=True)
    assert any(isinstance(error, LayoutMismatch) for error in errors), errors
    assert all(error and text in str(error) for error in errors), errors
