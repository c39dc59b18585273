"""DataParallel: a user's program does what it did before, and between ranks its gradients are the mean."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

paddle = pytest.importorskip("paddle")
from paddle import nn  # noqa: E402
from paddle.distributed.fleet.utils import recompute  # noqa: E402

from common.errors import PeerLost, UsageError  # noqa: E402
from common.paddle_api import backward  # noqa: E402
from common.paddle_api.data_parallel import FINGERPRINT, GradientAverage, fingerprint, share_buffers  # noqa: E402
from common.paddle_api.replicas import replicas_agree  # noqa: E402
from common.paddle_api.server_updates import UpdateByServers, listen_to_steps, stop_listening  # noqa: E402
from common.sync.local import LocalSynchronizer  # noqa: E402
from common.sync.synchronizer import ServerUpdates  # noqa: E402
from common.tensors.arena import FloatArray  # noqa: E402
from tests.support.groups import ROOT  # noqa: E402
from tests.support.traces import check_trace, read_trace, spans  # noqa: E402

PROGRAM = ROOT / "tests" / "programs" / "many_ways.py"


class Branches(nn.Layer):
    """Two heads, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Any, left: bool = True) -> Any:
        return (self.left if left else self.right)(nn.functional.relu(self.body(x)))


class Twice(LocalSynchronizer):
    """As if another rank had the same gradients times three: the mean is twice one's own."""

    fail_with: Exception | None = None

    def attach(self, arena: Any, optimizer: Any) -> None:
        self.arena, self.marked, self.steps = arena, [], 0
        super().attach(arena, optimizer)

    def mark_final(self, bucket: int) -> None:
        self.marked.append(bucket)
        if self.fail_with:
            raise self.fail_with

    def finish(self, learning_rate: float) -> None:
        self.steps += 1
        self.arena.gradients *= 2


@pytest.fixture
def wrapped() -> Any:
    """(model, its average over a Twice with tiny buckets, the synchronizer), unhooked at the end."""
    paddle.seed(3)
    model, synchronizer = Branches(), Twice()
    average = GradientAverage(model, synchronizer, first_bytes=64, bucket_bytes=64)
    average.share_parameters()
    backward.listen_to_backward(average)
    yield model, average, synchronizer
    backward.forget(average)


def plain() -> Any:
    paddle.seed(3)
    return Branches()


def batch(seed: int = 0) -> Any:
    return paddle.to_tensor(np.random.default_rng(seed).random((4, 6), np.float32))


def gradients(model: Any) -> dict[str, Any]:
    return {
        n: None if p.grad is None or p.grad.data_ptr() is None else p.grad.numpy() for n, p in model.named_parameters()
    }


def test_gradients_are_the_mean_after_backward(wrapped: Any) -> None:
    model, _, synchronizer = wrapped
    reference = plain()
    for each in (model, reference):
        each(batch()).sum().backward()
    found, expected = gradients(model), gradients(reference)
    for name, value in expected.items():
        if value is None:
            assert found[name] is None
        else:
            np.testing.assert_array_equal(found[name], 2 * value)
    assert synchronizer.steps == 1


@pytest.mark.parametrize("clear", ["clear_grad", "clear_grad_false", "clear_gradients", "none_of_them"])
def test_whoever_clears_gradients_nothing_stale_is_trained_on(wrapped: Any, clear: str) -> None:
    model, _, _ = wrapped
    optimizer = paddle.optimizer.SGD(0.0, parameters=model.parameters())
    results = []
    for seed in range(3):
        loss = model(batch(seed)).sum()
        if clear == "clear_grad":
            optimizer.clear_grad()
        elif clear == "clear_grad_false":
            optimizer.clear_grad(set_to_zero=False)
        elif clear == "clear_gradients":
            model.clear_gradients()
        loss.backward()
        results.append(gradients(model)["body.weight"])
    own = []
    for seed in range(3):
        reference = plain()
        reference(batch(seed)).sum().backward()
        own.append(gradients(reference)["body.weight"])
    accumulated = 2 * (2 * (2 * own[0] + own[1]) + own[2])
    expected = accumulated if clear == "none_of_them" else 2 * own[2]
    np.testing.assert_allclose(results[2], expected, rtol=1e-6)


def test_a_gradient_cleared_between_forward_and_backward(wrapped: Any) -> None:
    model, _, _ = wrapped
    model(batch(0)).sum().backward()
    loss = model(batch(1)).sum()
    model.clear_gradients()
    loss.backward()
    reference = plain()
    reference(batch(1)).sum().backward()
    np.testing.assert_array_equal(gradients(model)["body.bias"], 2 * gradients(reference)["body.bias"])


def test_an_unused_parameter_is_not_updated(wrapped: Any) -> None:
    model, _, _ = wrapped
    optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters(), weight_decay=0.1)
    for seed, left in enumerate([False, True, True]):
        before = model.right.weight.numpy().copy()
        model(batch(seed), left).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        assert np.array_equal(before, model.right.weight.numpy()) == left


def test_no_sync_accumulates_and_the_next_backward_synchronises_the_sum(wrapped: Any) -> None:
    model, average, synchronizer = wrapped
    average.enabled = False
    model(batch(0)).sum().backward()
    assert synchronizer.steps == 0
    average.enabled = True
    model(batch(1)).sum().backward()
    assert synchronizer.steps == 1
    reference = plain()
    for seed in (0, 1):
        reference(batch(seed)).sum().backward()
    np.testing.assert_array_equal(gradients(model)["body.weight"], 2 * gradients(reference)["body.weight"])


def test_a_backward_of_another_model_changes_nothing(wrapped: Any) -> None:
    model, _, synchronizer = wrapped
    model(batch()).sum().backward()
    before = gradients(model)
    nn.Linear(6, 2)(batch()).sum().backward()
    assert synchronizer.steps == 1
    after = gradients(model)
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])


def test_buckets_are_marked_during_backward_last_layer_first(wrapped: Any) -> None:
    model, average, synchronizer = wrapped
    model(batch()).sum().backward()
    assert synchronizer.marked == []  # the first one shows whether some parameter is reached more than once
    for _ in range(2):
        synchronizer.marked.clear()
        model(batch()).sum().backward()
    layout, buckets = average._arena.layout, average._arena.buckets
    order = [layout.slots_between(buckets[b].start, buckets[b].stop)[0].name for b in synchronizer.marked]
    assert order.index("left.weight") < order.index("body.weight")


def test_buckets_start_in_the_order_of_the_first_backward(wrapped: Any) -> None:
    """The heads come after the body in the arena; with its body last, a model's backward reaches that first."""
    _, average, synchronizer = wrapped
    orders: list[list[int]] = []
    synchronizer.launch_in = orders.append

    class Reversed(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(5, 3), nn.Linear(6, 5)

        def forward(self, x: Any) -> Any:
            return self.last(self.first(x))

    model = Reversed()
    other = GradientAverage(model, synchronizer, first_bytes=64, bucket_bytes=64)
    other.share_parameters()
    backward.forget(average)
    backward.listen_to_backward(other)
    try:
        for _ in range(2):
            model(batch()).sum().backward()
    finally:
        backward.forget(other)
    slots = {slot.name: slot.start for slot in synchronizer.arena.layout.slots}
    starts = [bucket.start for bucket in synchronizer.arena.buckets]
    assert len(orders) == 1
    assert sorted(orders[0]) == list(range(len(starts)))
    by_launch = [starts[bucket] for bucket in orders[0]]
    assert by_launch.index(slots["last.weight"]) < by_launch.index(slots["first.weight"])
    assert by_launch[-1] == 0  # the used-mask, known only when backward is done


def test_an_error_of_the_scheme_reaches_the_caller_of_backward_as_itself(wrapped: Any) -> None:
    model, _, synchronizer = wrapped
    model(batch()).sum().backward()
    synchronizer.fail_with = PeerLost("rank 1 died")
    with pytest.raises(PeerLost, match="rank 1 died"):
        model(batch()).sum().backward()


def test_freezing_a_wrapped_parameter_is_refused(wrapped: Any) -> None:
    model, _, _ = wrapped
    model.left.weight.stop_gradient = True
    with pytest.raises(UsageError, match=r"left\.weight was frozen after the model was wrapped"):
        model(batch()).sum().backward()


def test_unfreezing_a_parameter_of_a_wrapped_model_is_refused() -> None:
    model = Branches()
    model.left.weight.stop_gradient = True
    average = GradientAverage(model, LocalSynchronizer(), first_bytes=64, bucket_bytes=64)
    average.share_parameters()
    backward.listen_to_backward(average)
    try:
        model(batch()).sum().backward()
        model.left.weight.stop_gradient = False
        with pytest.raises(UsageError, match=r"left\.weight was unfrozen after the model was wrapped"):
            model(batch()).sum().backward()
    finally:
        average.stop()


def test_buffers_without_dimensions_are_shared() -> None:
    class Counting(nn.Linear):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.register_buffer("count", paddle.to_tensor(3))

    model = Counting()
    share_buffers(model, LocalSynchronizer())
    assert (tuple(model.count.shape), int(model.count)) == ((), 3)


def test_what_cannot_be_synchronised_is_refused() -> None:
    synchronizer = LocalSynchronizer()
    with pytest.raises(UsageError, match="no trainable parameter"):
        GradientAverage(nn.ReLU(), synchronizer, first_bytes=1, bucket_bytes=1)
    with pytest.raises(UsageError, match=r"bfloat16: only float32 and float64 .*auto_cast\(level='O1'\)"):
        GradientAverage(nn.Linear(2, 2).to(dtype="bfloat16"), synchronizer, first_bytes=1, bucket_bytes=1)


# ---- what the arena holds ---------------------------------------------------------------------------------------


class Tied(nn.Layer):
    """One weight by two names, as language models have it, and a float64 head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3).to(dtype="float64")

    def forward(self, x: Any) -> Any:
        return self.head(self.second(paddle.tanh(self.first(x))).astype("float64"))


class Rank1(Twice):
    """Rank 0's parameters, which all are one, arrive as the arena is attached."""

    def attach(self, arena: Any, optimizer: Any) -> None:
        super().attach(arena, optimizer)
        for slot in arena.layout.slots:
            arena.parameter(slot)[...] = 1


@contextmanager
def averaging(model: Any, synchronizer: Any) -> Iterator[GradientAverage]:
    average = GradientAverage(model, synchronizer, first_bytes=64, bucket_bytes=64)
    average.share_parameters()
    backward.listen_to_backward(average)
    try:
        yield average
    finally:
        backward.forget(average)


def test_sharing_gives_rank_0s_parameters_as_views_of_the_arena() -> None:
    model, synchronizer = Tied(), Rank1()
    with averaging(model, synchronizer):
        arena = synchronizer.arena
        values = dict(model.named_parameters())
        assert sorted(slot.name for slot in arena.layout.slots[1:]) == sorted(values)
        for slot in arena.layout.slots[1:]:
            assert values[slot.name].data_ptr() == arena.parameters[slot.start :].ctypes.data
            assert (values[slot.name].numpy() == 1).all()
            arena.parameter(slot)[...] = 2 + slot.start
            assert (values[slot.name].numpy() == 2 + slot.start).all()
            assert str(values[slot.name].dtype) == f"paddle.{slot.dtype}"


def test_optimizers_and_set_value_write_into_the_arena() -> None:
    model, synchronizer = Tied(), Rank1()
    with averaging(model, synchronizer):
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        for _ in range(2):
            model(batch()).sum().backward()
            optimizer.step()
            optimizer.clear_grad()
        model.first.bias.set_value(paddle.full([6], 7.0))
        model.set_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        values = dict(model.named_parameters())
        for slot in synchronizer.arena.layout.slots[1:]:
            np.testing.assert_array_equal(values[slot.name].numpy(), synchronizer.arena.parameter(slot))
        np.testing.assert_array_equal(model.first.bias.numpy(), np.full(6, 8, np.float32))


def test_a_tied_weight_is_one_parameter_with_the_sum_of_both_gradients() -> None:
    paddle.seed(3)
    model, synchronizer = Tied(), Twice()
    reference = Tied()
    reference.set_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    with averaging(model, synchronizer):
        names = [slot.name for slot in synchronizer.arena.layout.slots]
        assert sum(name.endswith("weight") for name in names) == 2  # the tied one and the head's
        assert model.first.weight is model.second.weight
        for each in (model, reference):
            each(batch()).sum().backward()
        np.testing.assert_array_equal(model.first.weight.grad.numpy(), 2 * reference.first.weight.grad.numpy())
        model(batch()).sum().backward()
        assert len(synchronizer.marked) == len(set(synchronizer.marked))


class Repeated(nn.Layer):
    """Blocks that share a weight, recomputed in backward or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.LayerList([nn.Linear(6, 6) for _ in range(3)])
        for block in self.blocks[1:]:
            block.weight = self.blocks[0].weight
        self.recomputed, self.used = True, 3

    def forward(self, x: Any, left: bool = True) -> Any:
        x = self.first(x)
        for block in self.blocks[: self.used]:
            x = paddle.tanh(recompute(block, x) if self.recomputed else block(x))
        return x


def repeated(*, serves_updates: bool, recomputed: bool) -> list[dict[str, bytes]]:
    found = []
    with life(Repeated, serves_updates=serves_updates) as each:
        each.model.recomputed = recomputed
        for _ in range(4):
            each.backward(theirs="first")
            each.step()
            found.append({name: p.numpy().tobytes() for name, p in each.model.named_parameters()})
    return found


@pytest.mark.parametrize("serves_updates", [True, False])
def test_recomputed_blocks_that_share_weights_train_as_others_do(serves_updates: bool) -> None:
    expected = repeated(serves_updates=serves_updates, recomputed=False)
    assert repeated(serves_updates=serves_updates, recomputed=True) == expected


def test_buckets_not_shared_are_marked_early_beside_those_that_are() -> None:
    model, synchronizer = Repeated(), Twice()
    with averaging(model, synchronizer) as average:
        for _ in range(2):
            model(batch()).sum().backward()
        names = [{s.name for s in average._arena.layout.slots_between(b.start, b.stop)} for b in average._arena.buckets]
        marked = [names[bucket] for bucket in synchronizer.marked]
        assert {"blocks.2.bias"} in marked
        assert not any("blocks.0.weight" in each for each in marked)


def test_weights_shared_by_recomputed_blocks_only_later_are_refused() -> None:
    model, synchronizer = Repeated(), Twice()
    with averaging(model, synchronizer):
        model.used = 1
        model(batch()).sum().backward()
        model.used = 3
        text = r"^backward reached parameter blocks\.0\.weight again after its gradient was sent"
        with pytest.raises(UsageError, match=text):
            model(batch()).sum().backward()


# ---- whether the program has changed something ------------------------------------------------------------------

ROWS, WIDTH = FINGERPRINT
EDGES = [n + d for n in (2 * WIDTH, 2 * WIDTH * ROWS, 5 * WIDTH * ROWS) for d in (-16, 0, 16)]
lengths = st.one_of(st.integers(1, 40).map(lambda n: 16 * n), st.sampled_from(EDGES))  # as arenas have


def values_in(length: int) -> FloatArray:
    return np.random.default_rng(length).standard_normal(length).astype(np.float32)


@settings(max_examples=60)
@given(lengths, st.data())
def test_a_fingerprint_shows_the_change_of_any_bit(length: int, data: st.DataObject) -> None:
    array = values_in(length)
    before = fingerprint(array)
    assert fingerprint(array.copy()) == before
    where = data.draw(st.sampled_from([0, length - 1, data.draw(st.integers(0, length - 1))]))
    array.view(np.uint32)[where] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    assert fingerprint(array) != before


@settings(max_examples=60)
@given(lengths, st.data())
def test_a_fingerprint_shows_values_that_have_changed_places(length: int, data: st.DataObject) -> None:
    """Two, or two whole runs of them, as when the weights of two layers are exchanged."""
    array = values_in(length)
    before = fingerprint(array)
    size = data.draw(st.sampled_from([1, 2, 8, length // 2, min(length // 2, 2 * WIDTH)]))
    a = data.draw(st.integers(0, length - 2 * size))
    b = data.draw(st.integers(a + size, length - size))
    array[a : a + size], array[b : b + size] = array[b : b + size].copy(), array[a : a + size].copy()
    assert fingerprint(array) != before


@pytest.mark.parametrize("length", [16, 4096, 100_000])
def test_a_fingerprint_shows_a_change_of_sign_or_scale_of_all(length: int) -> None:
    array = values_in(length)
    fingerprints = {fingerprint(array * np.float32(factor)) for factor in (1, -1, 0.5, 2, 0)}
    assert len(fingerprints) == 5
    assert fingerprint(array[::-1].copy()) not in fingerprints


class Pair(ServerUpdates):
    """This rank, and another one that gives gradients too, each all of one value.

    By servers it updates as SGD does; otherwise it only averages.
    """

    scheme, backend, rank, nranks = "pair", "none", 0, 2

    def __init__(self, *, serves_updates: bool) -> None:
        self.serves_updates = serves_updates
        self.theirs: list[tuple[str, bool]] = []  # for each backward: what it reaches, whether it adds to the average
        self.ends: list[tuple[Any, ...]] = []
        self.loaded: dict[str, Any] | None = None
        self._count = 0

    def attach(self, arena: Any, optimizer: Any) -> None:
        self.arena, self._pushed = arena, {}
        self._average = np.zeros_like(arena.gradients)

    def mark_final(self, bucket: int) -> None:
        where = self.arena.buckets[bucket]
        assert bucket not in self._pushed
        self._pushed[bucket] = self.arena.gradients[where.start : where.stop].copy()

    def _mean(self) -> FloatArray:
        self._count += 1
        reached, adds = self.theirs.pop(0)
        other = self._average * adds
        for number, slot in enumerate(self.arena.layout.slots[1:]):
            if slot.name.startswith(tuple(reached.split())):
                other[slot.start : slot.stop] += (self._count + number) / 8
                other[number] = 1  # in the slot that tells what was used
        mean = other
        for bucket, where in enumerate(self.arena.buckets):
            part = slice(where.start, where.stop)
            mean[part] = (self._pushed.pop(bucket, self.arena.gradients[part]) + other[part]) / 2
        self._average = mean.copy()
        return mean

    def finish(self, learning_rate: float) -> None:
        self.arena.gradients[...] = self._mean()
        self.ends.append(("average",))

    def configure(self, optimizer: Any, names: Any) -> None:
        self.ends.append(("configure", optimizer.name))

    def update(self, learning_rate: float, *, used: bytes, again: bool = False, replaced: bool = False) -> None:
        mean = self._average if again else self._mean()
        for number, slot in enumerate(self.arena.layout.slots[1:]):
            if mean[number] > 0 or used[number + 1]:
                where = slice(slot.start, slot.stop)
                self.arena.parameters[where] -= np.float32(learning_rate) * mean[where]
        self.ends.append(("update", again, replaced))

    def optimizer_state(self) -> dict[str, Any]:
        return {}

    def load_optimizer_state(self, state: Any) -> None:
        self.loaded = dict(state)

    def all_gather(self, values: Any) -> Any:
        return np.stack([values, values])

    def close(self, reason: str = "") -> None:
        pass


class Life:
    """A program on rank 0 of two, with the other rank's part in it."""

    def __init__(self, synchronizer: Pair, average: GradientAverage, model: Any) -> None:
        self.synchronizer, self.average, self.model = synchronizer, average, model
        self.optimizer = paddle.optimizer.SGD(2**-6, parameters=model.parameters())  # a power of two: no rounding
        self.seed = 0

    def backward(self, *, left: bool = True, theirs: str = "body left", adds: bool = False) -> None:
        """Of both ranks; `theirs` is what the other one's reaches."""
        if self.average.enabled:
            self.synchronizer.theirs.append((theirs, adds))
        self.seed += 1
        (self.model(batch(self.seed), left) ** 2).sum().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.clear_grad()


@contextmanager
def life(kind: Callable[[], Any] = Branches, *, serves_updates: bool) -> Iterator[Life]:
    paddle.seed(3)
    model, synchronizer = kind(), Pair(serves_updates=serves_updates)
    with averaging(model, synchronizer) as average:
        if serves_updates:
            listen_to_steps(UpdateByServers(synchronizer, average, "auto"))
        try:
            yield Life(synchronizer, average, model)
        finally:
            stop_listening()


def clear_gradients(each: Life) -> None:
    each.model.clear_gradients()


def clear_grad(each: Life) -> None:
    each.optimizer.clear_grad()


def drop_grad(each: Life) -> None:
    each.optimizer.clear_grad(set_to_zero=False)


def skipped(clear: Callable[[Life], None], **second: Any) -> Callable[[Life], None]:
    """A step is left out, as after an overflow, and its gradients are thrown away."""

    def program(each: Life) -> None:
        each.backward(theirs="body right")
        clear(each)
        each.backward(**second)
        each.step()

    return program


def two_backwards(each: Life) -> None:
    each.backward()
    each.backward(adds=True)
    each.step()


def two_backwards_of_other_parts(each: Life) -> None:
    """What only the other rank has used in the first one counts in full."""
    each.backward(left=True, theirs="body right")
    each.backward(left=True, theirs="body right", adds=True)
    each.step()


def three_backwards_of_changing_parts(each: Life) -> None:
    for number in range(3):
        each.backward(left=number % 2 == 0, theirs="body right" if number == 1 else "body", adds=number > 0)
    each.step()


def another_model(each: Life) -> None:
    each.backward()
    nn.Linear(6, 2)(batch()).sum().backward()
    each.step()


def another_model_between_two(each: Life) -> None:
    each.backward(theirs="body right")
    nn.Linear(6, 2)(batch()).sum().backward()
    each.backward(adds=True)
    each.step()


def no_sync_before(each: Life) -> None:
    each.average.enabled = False
    each.backward()
    each.average.enabled = True
    each.backward()
    each.step()


def weights_set(each: Life) -> None:
    each.backward()
    each.model.left.weight.set_value(paddle.full([5, 3], 0.25))
    each.step()


def weights_exchanged(each: Life) -> None:
    each.backward()
    left, right = each.model.left.weight.clone(), each.model.right.weight.clone()
    each.model.left.weight.set_value(right)
    each.model.right.weight.set_value(left)
    each.step()


PROGRAMS: dict[str, Callable[[Life], None]] = {
    "skipped, clear_gradients": skipped(clear_gradients),
    "skipped, clear_grad": skipped(clear_grad),
    "skipped, clear_grad to none": skipped(drop_grad),
    "skipped, then another part": skipped(clear_grad, left=False),
    **{
        function.__name__.replace("_", " "): function
        for function in (
            two_backwards,
            two_backwards_of_other_parts,
            three_backwards_of_changing_parts,
            another_model,
            another_model_between_two,
            no_sync_before,
            weights_set,
            weights_exchanged,
        )
    },
}


def history_of(program: Callable[[Life], None], *, serves_updates: bool) -> list[dict[str, bytes]]:
    """The parameters after each step: two as usual, the program, and one more."""
    found = []
    with life(serves_updates=serves_updates) as each:
        for part in (None, None, program, None):
            if part:
                part(each)
            else:
                each.backward()
                each.step()
            found.append({name: p.numpy().tobytes() for name, p in each.model.named_parameters()})
        assert any(end[0] == "update" for end in each.synchronizer.ends) == serves_updates
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_updates_by_servers_are_those_by_trainers_whatever_the_program_does(name: str) -> None:
    by_servers, by_trainers = (history_of(PROGRAMS[name], serves_updates=s) for s in (True, False))
    assert by_servers == by_trainers
    assert len({tuple(values.values()) for values in by_servers}) == 4


def test_the_average_that_backward_waited_for_is_used_again_at_the_first_step_only() -> None:
    with life(serves_updates=True) as each:
        for _ in range(2):
            each.backward()
            each.step()
        two_backwards(each)
        assert each.synchronizer.ends == [
            ("average",),
            ("configure", "sgd"),
            ("update", True, False),
            ("update", False, False),
            ("average",),
            ("update", False, False),
        ]


@pytest.fixture
def served() -> Iterator[Life]:
    """A program that has made two steps by servers, and a backward."""
    with life(serves_updates=True) as each:
        for _ in range(2):
            each.backward()
            each.step()
        each.backward()
        yield each


PARAMETER_CHANGES: dict[str, Callable[[Any], object]] = {
    "set_value": lambda m: m.left.bias.set_value(paddle.ones([3])),
    "set_state_dict": lambda m: m.set_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "data": lambda m: setattr(m.left.bias, "data", paddle.full([3], 5.0)),
    "in place": lambda m: paddle.no_grad()(lambda: m.left.bias.add_(paddle.ones([3])))(),
    "one bit": lambda m: m.left.bias.set_value(paddle.nextafter(m.left.bias, paddle.full([3], 9.0))),
}


@pytest.mark.parametrize("how", PARAMETER_CHANGES)
def test_changed_parameters_are_noticed_once_and_are_views_again(served: Life, how: str) -> None:
    average, model, arena = served.average, served.model, served.synchronizer.arena
    assert not average.parameters_changed()
    PARAMETER_CHANGES[how](model)
    expected = {name: p.numpy().tobytes() for name, p in model.named_parameters()}
    assert average.parameters_changed()
    values = dict(model.named_parameters())
    for slot in arena.layout.slots[1:]:
        assert values[slot.name].data_ptr() == arena.parameters[slot.start :].ctypes.data
        assert arena.parameter(slot).tobytes() == expected[slot.name]
    average.parameters_updated()
    assert not average.parameters_changed()


@pytest.mark.parametrize("how", PARAMETER_CHANGES)
def test_a_step_after_a_change_says_that_parameters_were_replaced(served: Life, how: str) -> None:
    PARAMETER_CHANGES[how](served.model)
    served.step()
    assert served.synchronizer.ends[-1] == ("update", False, True)
    served.backward()
    served.step()
    assert served.synchronizer.ends[-1] == ("update", False, False)


def test_values_set_as_they_were_are_no_change(served: Life) -> None:
    served.model.set_state_dict({k: v.clone() for k, v in served.model.state_dict().items()})
    served.step()
    assert served.synchronizer.ends[-1] == ("update", False, False)


GRADIENT_CHANGES: dict[str, Callable[[Any], object]] = {
    "scaled": lambda m: m.left.bias.grad.scale_(0.5),
    "negated": lambda m: [p.grad.scale_(-1.0) for p in (m.left.bias, m.left.weight)],
    "clipped": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-3),
    "replaced": lambda m: setattr(m.left.bias, "grad", paddle.ones([3])),
    "cleared": lambda m: m.left.bias.clear_gradient(False),
    "zeroed": lambda m: m.left.bias.clear_gradient(True),
    "moved along": lambda m: m.left.weight.grad.set_value(m.left.weight.grad.roll(1, 0)),
}


@pytest.mark.parametrize("how", GRADIENT_CHANGES)
def test_changed_gradients_are_noticed(served: Life, how: str) -> None:
    assert not served.average.gradients_changed()
    GRADIENT_CHANGES[how](served.model)
    assert served.average.gradients_changed()
    with pytest.raises(UsageError, match=r"^the program changed gradients between backward and optimizer\.step\(\)"):
        served.step()


def test_looking_at_gradients_is_no_change(served: Life) -> None:
    assert all(np.isfinite(value).all() for value in gradients(served.model).values() if value is not None)
    assert sum(float((p.grad**2).sum()) for p in served.model.left.parameters()) > 0
    assert not served.average.gradients_changed()


def results_of(output: str) -> list[str]:
    return sorted(line[len("RESULT ") :] for line in output.splitlines() if line.startswith("RESULT "))


def launch(scheme: str, nranks: int, folder: Path, *flags: str) -> list[str]:
    """Run the program under a scheme; returns "rank digest" of every rank."""
    log, trace = folder / scheme, ["--trace", str(folder / f"{scheme}.json")]
    worker = [
        str(ROOT / "benchmarks" / "training" / "script_worker.py"),
        scheme,
        str(folder / "record"),
        str(PROGRAM),
    ]
    command = {
        "ps": ["-m", "ps.run", "--nranks", str(nranks), "--log-dir", str(log), *trace],
        "collective": ["-m", "collective.run", "--nranks", str(nranks), "--log-dir", str(log), *trace],
        "paddle": [
            "-m",
            "paddle.distributed.launch",
            "--nproc_per_node",
            str(nranks),
            "--backend",
            "gloo",
            "--log_dir",
            str(log),
        ],
    }[scheme]
    done = subprocess.run(
        [sys.executable, *command, *worker, *flags],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    logs = "\n".join(p.read_text(errors="replace") for p in sorted(log.glob("workerlog.*")))
    assert done.returncode == 0, done.stderr + logs
    return results_of(logs)


def check_trace_of_program(trace: dict[str, Any], *, servers: int) -> None:
    steps, buckets = len(spans(trace, pid=0, cat="step")), len({e["tid"] for e in spans(trace, pid=0, cat="bucket")})
    assert (steps, buckets) > (1, 1)
    phases = frozenset({"backward"})
    check_trace(trace, nranks=2, servers=servers, steps=range(steps), buckets=buckets, phases=phases)


@pytest.mark.processes
@pytest.mark.parametrize("flags", [(), ("--unused",)])
def test_two_ranks_equal_paddles_data_parallel_bit_for_bit(tmp_path: Path, flags: tuple[str, ...]) -> None:
    found = {scheme: launch(scheme, 2, tmp_path, *flags) for scheme in ("ps", "collective")}
    assert len(found["ps"]) == 2
    for scheme in found:
        check_trace_of_program(read_trace(tmp_path / f"{scheme}.json"), servers=int(scheme == "ps"))
    assert len({line.split()[1] for line in found["ps"]}) == 1
    assert found["ps"] == found["collective"]
    if not flags:
        assert launch("paddle", 2, tmp_path) == found["ps"]


@pytest.mark.processes
def test_one_rank_needs_no_launcher(tmp_path: Path) -> None:
    program = tmp_path / "alone.py"
    program.write_text(
        PROGRAM.read_text()
        .replace("import paddle.distributed as dist", "import collective as dist")
        .replace("paddle.DataParallel", "dist.DataParallel")
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert results_of(done.stdout) == launch("ps", 1, tmp_path)


APART = """
import paddle
from paddle import nn
import {scheme} as dist
dist.init()
model = dist.DataParallel(nn.Linear(3, 2))
optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
for step in range(12):
    model(paddle.ones([4, 3])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
    if step == {step} and dist.get_rank() == 2:
        model.parameters()[0].set_value(model.parameters()[0] * 1.5)
print("trained")
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("scheme", "flags", "step", "backward"),
    [
        ("collective", (), 0, 2),
        pytest.param("ps", ("--update", "trainer"), 4, 10, marks=pytest.mark.long),
        ("ps", ("--update", "trainer"), 99, None),
        pytest.param("collective", (), 99, None, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_trains_on_parameters_of_its_own_is_named_once(
    tmp_path: Path, scheme: str, flags: tuple[str, ...], step: int, backward: int | None
) -> None:
    program = tmp_path / "apart.py"
    program.write_text(APART.format(scheme=scheme, step=step))
    done = subprocess.run(
        [sys.executable, "-m", f"{scheme}.run", "--nranks", "3", *flags, str(program)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    text = f"gradsync: in averaging backward {backward} the parameters of rank 2 differ from rank 0's: unless"
    assert done.stderr.startswith(text) if backward else not done.stderr
    assert done.stderr.count("\n") == bool(backward)


def test_parameters_are_compared_seldom_and_only_where_ranks_update(wrapped: Any) -> None:
    model, average, synchronizer = wrapped
    gathered = []

    def all_gather(values: np.ndarray) -> np.ndarray:
        gathered.append((synchronizer.steps, values.copy()))
        return values[None]

    synchronizer.all_gather = all_gather
    for _ in range(11):
        for average.enabled in (False, True):
            model(batch()).sum().backward()
    compared = [step for step, values in gathered if values.size == 1]
    assert compared == [2, 10]
    before, after = (values for _, values in gathered if values.size == 1)
    assert before == after
    model.body.weight.set_value(model.body.weight + 1)
    replicas_agree((p.numpy() for p in model.parameters()), synchronizer, "")
    assert gathered[-1][1] != after
    average.leave_to_servers()
    del gathered[:]
    average._averagings = 98
    for _ in range(3):
        model(batch()).sum().backward()
    assert gathered == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "dist.DataParallel(nn.Linear(2, 2)); dist.DataParallel(nn.Linear(2, 2))",
            "a second model was given to DataParallel",
        ),
        (
            "dist.distributed_model(nn.Linear(2, 2)); other = nn.Linear(2, 2);"
            "dist.distributed_optimizer(paddle.optimizer.SGD(parameters=other.parameters()))",
            "the optimizer has no parameter of the model given to distributed_model",
        ),
        ("dist.DataParallel(nn.Linear(2, 2), group=object())", "sub-groups are not supported"),
        ("dist.DataParallel(nn.Linear(2, 2 + dist.get_rank()))", "rank . and rank . disagree"),
    ],
    ids=["two models", "another model's optimizer", "group", "different models"],
)
@pytest.mark.parametrize("scheme", ["ps", "collective"])
def test_wrong_use_is_named_on_every_rank(tmp_path: Path, scheme: str, body: str, text: str) -> None:
    program = tmp_path / "wrong.py"
    program.write_text(f"import paddle\nfrom paddle import nn\nimport {scheme} as dist\ndist.init()\n{body}\n")
    command = ["-m", f"{scheme}.run", "--nranks", "2", "--log-dir", str(tmp_path / "log"), str(program)]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 2, done.stderr
    for log in (tmp_path / "log").glob("workerlog.*"):
        lines = log.read_text().strip().splitlines()
        assert len(lines) == 1, lines
        assert re.search(text, lines[0]) or "left" in lines[0]
    assert re.search(text, done.stderr)
