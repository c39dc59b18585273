"""Small Paddle models, batches and synchronizers of a rank by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")
from paddle import nn  # noqa: E402

from common.paddle_api import backward  # noqa: E402
from common.paddle_api.arena_binding import trainable  # noqa: E402
from common.paddle_api.gradient_average import GradientAverage  # noqa: E402
from common.paddle_api.optimizer_hook import OptimizerHook, forget_steps, listen_to_steps  # noqa: E402
from common.sync.local import LocalSynchronizer  # noqa: E402
from common.sync.synchronizer import ServerOptimizer, Synchronizer  # noqa: E402
from common.tensors.arena import FloatArray  # noqa: E402

__all__ = ["Branches", "Life", "Twice", "averaging", "batch", "clear_grad", "clear_gradients", "gradients", "life"]


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

    def mark_ready(self, bucket: int) -> None:
        self.marked.append(bucket)
        if self.fail_with:
            raise self.fail_with

    def finish(self, learning_rate: float) -> None:
        self.steps += 1
        self.arena.gradients *= 2


def batch(seed: int = 0) -> Any:
    return paddle.to_tensor(np.random.default_rng(seed).random((4, 6), np.float32))


def gradients(model: Any) -> dict[str, Any]:
    return {
        n: None if p.grad is None or p.grad.data_ptr() is None else p.grad.numpy() for n, p in model.named_parameters()
    }


@contextmanager
def averaging(model: Any, synchronizer: Any) -> Iterator[GradientAverage]:
    average = GradientAverage(trainable(model), synchronizer, first_bytes=64, bucket_bytes=64)
    average.share_parameters()
    backward.listen_to_backward(average)
    try:
        yield average
    finally:
        backward.forget(average)


class Pair(Synchronizer, ServerOptimizer):
    """This rank, and another one that gives gradients too, each all of one value.

    By servers it updates as SGD does; otherwise it only averages.
    """

    scheme, backend, rank, nranks = "pair", "none", 0, 2

    def __init__(self, *, serves_updates: bool) -> None:
        self.server_optimizer = self if serves_updates else None
        self.theirs: list[tuple[str, bool]] = []  # for each backward: what it reaches, whether it adds to the average
        self.ends: list[tuple[Any, ...]] = []
        self.loaded: dict[str, Any] | None = None
        self._count = 0

    def attach(self, arena: Any, optimizer: Any) -> None:
        self.arena, self._pushed = arena, {}
        self._average = np.zeros_like(arena.gradients)

    def mark_ready(self, bucket: int) -> None:
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

    def keep(self, updates: int, step: int) -> None:
        self.ends.append(("keep", updates, step))

    def configure(self, optimizer: Any, names: Any) -> None:
        self.ends.append(("configure", optimizer.name))

    def update(self, learning_rate: float, *, used: bytes, again: bool = False, replaced: bool = False) -> None:
        mean = self._average if again else self._mean()
        for number, slot in enumerate(self.arena.layout.slots[1:]):
            if mean[number] > 0 or used[number + 1]:
                where = slice(slot.start, slot.stop)
                self.arena.parameters[where] -= np.float32(learning_rate) * mean[where]
        self.ends.append(("update", again, replaced))

    def look_back(self) -> None:
        """It has no guard."""

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Any) -> None:
        self.loaded = dict(state)

    def all_gather(self, values: Any) -> Any:
        return np.stack([values, values])

    def another(self) -> Any:
        return Pair(serves_updates=self.server_optimizer is not None)

    def close(self, reason: str = "") -> None:
        pass


class Life:
    """A program on rank 0 of two, with the other rank's part in it."""

    def __init__(self, synchronizer: Pair, average: GradientAverage, model: Any) -> None:
        self.synchronizer, self.average, self.model = synchronizer, average, model
        self.optimizer = paddle.optimizer.SGD(2**-6, parameters=model.parameters())  # a power of two: no rounding
        self.seed = 0
        self.hook: Any = None
        self.failures: list[Exception] = []  # of updates

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
        each = Life(synchronizer, average, model)
        if not serves_updates:
            yield each
            return
        each.hook = OptimizerHook(synchronizer, average, each.failures.append)
        listen_to_steps(each.hook)
        try:
            yield each
        finally:
            forget_steps(each.hook)


def clear_gradients(each: Life) -> None:
    each.model.clear_gradients()


def clear_grad(each: Life) -> None:
    each.optimizer.clear_grad()
