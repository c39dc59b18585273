"""DataParallel: a user's program does what it did before, and its gradients are the mean after backward."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")
from paddle import nn  # noqa: E402

from common.errors import PeerLost  # noqa: E402
from common.paddle_api import backward  # noqa: E402
from common.paddle_api.arena_binding import trainable  # noqa: E402
from common.paddle_api.gradient_average import GradientAverage  # noqa: E402
from common.paddle_api.wrapped_models import share_buffers  # noqa: E402
from common.sync.local import LocalSynchronizer  # noqa: E402
from common.system.switching import OFTEN_S  # noqa: E402
from tests.support.paddle_models import Branches, batch, gradients  # noqa: E402


def plain() -> Any:
    paddle.seed(3)
    return Branches()


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


def test_threads_take_turns_more_often_within_a_backward_only(wrapped: Any) -> None:
    model, _, _ = wrapped
    seen = []
    model.body.weight._register_backward_hook(lambda: seen.append(sys.getswitchinterval()))
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        model(batch()).sum().backward()
        assert (seen, sys.getswitchinterval()) == ([pytest.approx(OFTEN_S)], pytest.approx(0.005))
    finally:
        sys.setswitchinterval(before)


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


@pytest.mark.parametrize("to_zero", [True, False])
def test_an_unused_parameter_is_updated_only_by_a_gradient_that_was_set_to_zero(wrapped: Any, to_zero: bool) -> None:
    """As by Paddle alone: `clear_grad` leaves zeros, unless it is told to drop them."""
    model, _, _ = wrapped
    optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters(), weight_decay=0.1)
    for seed, left in enumerate([False, True, True]):
        before = model.right.weight.numpy().copy()
        model(batch(seed), left).sum().backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=to_zero)
        assert np.array_equal(before, model.right.weight.numpy()) == (left and not to_zero)


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
    layout, buckets = average.binding.arena.layout, average.binding.arena.buckets
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
    other = GradientAverage(trainable(model), synchronizer, first_bytes=64, bucket_bytes=64)
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


def test_buffers_without_dimensions_are_shared() -> None:
    class Counting(nn.Linear):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.register_buffer("count", paddle.to_tensor(3))

    model = Counting()
    share_buffers(model, LocalSynchronizer(), set())
    assert (tuple(model.count.shape), int(model.count)) == ((), 3)
