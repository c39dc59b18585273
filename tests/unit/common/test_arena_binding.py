"""A model bound to an arena trains as without one, whoever clears its gradients, and tells of complete buckets."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from paddle import nn  # noqa: E402
from paddle.nn import functional  # noqa: E402

from common.errors import UsageError  # noqa: E402
from common.paddle_api.arena_binding import Binding, digest_of_model, layout_of, trainable  # noqa: E402
from common.tensors.arena import Arena, sha256_of_parameters  # noqa: E402
from common.tensors.buckets import plan_buckets  # noqa: E402
from common.tensors.flat_optimizer import FlatOptimizer  # noqa: E402
from common.tensors.optimizers import Momentum  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track:UserWarning")  # BatchNorm

STEPS = 6
RATE = 0.05


class Branches(nn.Layer):
    """Two branches, one layer used twice under two names, and one that is not used when `skip` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 5), nn.Linear(8, 5)
        self.shared = nn.Linear(5, 5)
        self.again = self.shared
        self.sometimes = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)
        self.skip = False

    def forward(self, x: Any) -> Any:
        h = functional.relu(self.left(x)) + self.shared(self.right(x))
        if not self.skip:
            h = h + self.sometimes(h)
        return self.last(self.again(h))


def convolutional() -> Any:
    return nn.Sequential(
        nn.Conv2D(1, 3, 3), nn.BatchNorm2D(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 7), nn.ReLU(), nn.Linear(7, 3)
    )


def frozen() -> Any:
    model = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))
    model[0].weight.stop_gradient = True
    return model


KINDS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "conv": (convolutional, (1, 8, 8)),
    "branches": (Branches, (8,)),
    "frozen": (frozen, (8,)),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(kind: str) -> Any:
    paddle.seed(7)
    return KINDS[kind][0]()


def batches(kind: str) -> Iterator[tuple[Any, Any]]:
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        images = rng.standard_normal((5, *KINDS[kind][1])).astype(np.float32)
        yield paddle.to_tensor(images), paddle.to_tensor(rng.integers(0, 3, 5))


def bind(model: Any, on_complete: Callable[[int], None] = lambda bucket: None) -> tuple[Arena, Binding]:
    """An arena of many small buckets, and the model bound to it."""
    layout = layout_of(model)
    starts = [slot.start for slot in layout.slots]
    arena = Arena(layout, buckets=plan_buckets(starts, layout.length, first_bytes=64, bucket_bytes=192))
    bound = Binding(trainable(model), arena, on_complete)
    bound.fill_arena()
    bound.bind_parameters()
    return arena, bound


def backward(bound: Binding, model: Any, batch: tuple[Any, Any]) -> None:
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    bound.begin()
    loss.backward()
    bound.complete_rest()


def digests_of_ordinary_training(kind: str) -> list[str]:
    model = make(kind)
    optimizer = paddle.optimizer.Momentum(RATE, parameters=model.parameters(), weight_decay=0.01)
    found = []
    for images, labels in batches(kind):
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.clear_grad()
        found.append(digest_of_model(model))
    return found


def digests_in_an_arena(kind: str, between: Callable[[Any], object] = lambda model: None) -> list[str]:
    model = make(kind)
    arena, bound = bind(model)
    optimizer = FlatOptimizer(Momentum(weight_decay=0.01), arena.parameters, arena.gradients)
    found = []
    for batch in batches(kind):
        backward(bound, model, batch)
        optimizer.step(RATE)
        found.append(digest_of_model(model))
        between(model)
    bound.close()
    return found


def test_training_gives_the_bits_of_ordinary_training(kind: str) -> None:
    expected = digests_of_ordinary_training(kind)
    assert len(set(expected)) == STEPS
    assert digests_in_an_arena(kind) == expected


def clear_by_optimizer(model: Any, *, set_to_zero: bool) -> None:
    paddle.optimizer.SGD(parameters=model.parameters()).clear_grad(set_to_zero=set_to_zero)


CLEARING: dict[str, Callable[[Any], object]] = {
    "optimizer, to zero": lambda model: clear_by_optimizer(model, set_to_zero=True),
    "optimizer, dropped": lambda model: clear_by_optimizer(model, set_to_zero=False),
    "model": lambda model: model.clear_gradients(),
    "one parameter": lambda model: model.parameters()[-1].clear_gradient(),
    "own gradients": lambda model: [p._set_grad_ivar(paddle.ones_like(p)) for p in model.parameters()],
    "values set": lambda model: model.set_state_dict({k: v.clone() for k, v in model.state_dict().items()}),
}


@pytest.mark.parametrize("how", CLEARING)
def test_training_survives_what_a_user_does_between_steps(how: str) -> None:
    assert digests_in_an_arena("conv", CLEARING[how]) == digests_of_ordinary_training("conv")


def test_parameters_and_gradients_are_views(kind: str) -> None:
    model = make(kind)
    arena, bound = bind(model)
    backward(bound, model, next(batches(kind)))
    values = dict(model.state_dict())
    for slot in arena.layout.slots:
        name = slot.name
        assert values[name].data_ptr() == arena.parameters[slot.start :].ctypes.data
        assert values[name].grad.data_ptr() == arena.gradients[slot.start :].ctypes.data
        np.testing.assert_array_equal(values[name].numpy(), arena.parameter(slot))
    bound.close()


def test_each_bucket_is_final_once_a_step_with_its_gradients_complete(kind: str) -> None:
    told: list[int] = []
    seen: dict[int, np.ndarray] = {}

    def on_complete(bucket: int) -> None:
        told.append(bucket)
        seen[bucket] = arena.gradients[arena.buckets[bucket].start : arena.buckets[bucket].stop].copy()

    model = make(kind)
    arena, bound = bind(model, on_complete)
    assert len(arena.buckets) >= 2
    for batch in batches(kind):
        told.clear()
        backward(bound, model, batch)
        assert sorted(told) == list(range(len(arena.buckets)))
        for bucket, gradients in seen.items():
            cut = slice(arena.buckets[bucket].start, arena.buckets[bucket].stop)
            np.testing.assert_array_equal(gradients, arena.gradients[cut])
    assert arena.gradients.any()
    bound.close()


def test_buckets_are_told_during_backward() -> None:
    told: list[int] = []
    model = make("conv")
    arena, bound = bind(model, told.append)
    loss = model(next(batches("conv"))[0]).sum()
    bound.begin()
    assert told == []
    loss.backward()
    assert told[0] == 0
    assert len(told) == len(arena.buckets)
    bound.complete_rest()
    assert len(told) == len(arena.buckets)
    bound.close()


def test_an_unused_parameter_counts_as_final_with_a_zero_gradient() -> None:
    told: list[int] = []
    model = make("branches")
    arena, bound = bind(model, told.append)
    unused = [slot for slot in arena.layout.slots if slot.name.startswith("sometimes")]
    for step, batch in enumerate(batches("branches")):
        model.skip = step % 2 == 1
        told.clear()
        backward(bound, model, batch)
        assert sorted(told) == list(range(len(arena.buckets)))
        for slot in unused:
            assert arena.gradients[slot.start : slot.stop].any() != model.skip
    bound.close()


def test_an_error_in_on_complete_is_raised_as_itself_once() -> None:
    class Odd(Exception):
        pass

    error: Exception | None = Odd("bucket 1")

    def on_complete(bucket: int) -> None:
        if bucket == 1 and error:
            raise error

    model = make("conv")
    _, bound = bind(model, on_complete)
    first, second, *_ = batches("conv")
    with pytest.raises(Odd) as caught:
        backward(bound, model, first)
    assert caught.value is error
    error = None
    backward(bound, model, second)
    bound.close()


def test_closing_gives_the_model_memory_of_its_own(kind: str) -> None:
    told: list[int] = []
    model = make(kind)
    arena, bound = bind(model, told.append)
    backward(bound, model, next(batches(kind)))
    before = digest_of_model(model)
    bound.close()
    arena.parameters.fill(5)
    arena.gradients.fill(6)
    assert digest_of_model(model) == before
    told.clear()
    for p in model.parameters():
        assert p.grad is None or not p.grad.numpy().any()
    optimizer = paddle.optimizer.SGD(RATE, parameters=model.parameters())
    functional.cross_entropy(*through(model, kind)).backward()
    optimizer.step()
    assert told == []
    assert digest_of_model(model) != before
    assert (arena.parameters == 5).all()
    assert (arena.gradients == 6).all()


def test_closing_within_a_step_leaves_nobody_to_tell() -> None:
    told: list[int] = []
    model = make("branches")
    _, bound = bind(model, told.append)
    bound.begin()
    bound.close()
    functional.cross_entropy(*through(model, "branches")).backward()
    assert told == []


def through(model: Any, kind: str) -> tuple[Any, Any]:
    images, labels = next(batches(kind))
    return model(images), labels


def test_a_model_can_be_bound_again_after_close() -> None:
    model, expected = make("conv"), digests_of_ordinary_training("conv")
    found = []
    for batch in batches("conv"):
        arena, bound = bind(model)
        optimizer = FlatOptimizer(Momentum(weight_decay=0.01), arena.parameters, arena.gradients)
        backward(bound, model, batch)
        optimizer.step(RATE)
        found.append(digest_of_model(model))
        bound.close()
    assert found[0] == expected[0]
    assert len(set(found)) == STEPS


def test_a_model_goes_when_nobody_uses_it_any_longer() -> None:
    """Paddle keeps hooks beside its parameters, where Python's garbage collector cannot see a cycle."""
    model = make("branches")
    arena, bound = bind(model)
    backward(bound, model, next(batches("branches")))
    bound.close()
    gone = [ref(each) for each in (model, bound, arena)]
    del model, bound, arena
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def test_layout_follows_the_state_dict() -> None:
    model = convolutional()
    assert [(slot.name, slot.shape) for slot in layout_of(model).slots] == [
        ("0.weight", (3, 1, 3, 3)),
        ("0.bias", (3,)),
        ("1.weight", (3,)),
        ("1.bias", (3,)),
        ("4.weight", (108, 7)),
        ("4.bias", (7,)),
        ("6.weight", (7, 3)),
        ("6.bias", (3,)),
    ]


def test_what_is_frozen_is_left_out() -> None:
    assert [slot.name for slot in layout_of(frozen()).slots] == ["0.bias", "2.weight", "2.bias"]


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(UsageError, match="the model has no trainable parameter"):
        layout_of(nn.ReLU())


def test_another_type_than_float32_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(dtype="float64"))
    with pytest.raises(UsageError, match=r"parameter 1\.weight is paddle\.float64; only float32"):
        layout_of(model)


def test_digest_of_a_model_is_over_its_trainable_parameters() -> None:
    model = make("conv")
    state = model.state_dict()
    names = [slot.name for slot in layout_of(model).slots]
    assert digest_of_model(model) == sha256_of_parameters((name, state[name].numpy()) for name in names)
    before = digest_of_model(model)
    state["1._mean"].set_value(paddle.ones([3]))
    assert digest_of_model(model) == before
    state["1.bias"].set_value(paddle.ones([3]))
    assert digest_of_model(model) != before
