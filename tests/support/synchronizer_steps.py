"""Steps of a synchronizer and what NumPy makes of them, for the checks of its contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from common.sync.synchronizer import Synchronizer
from common.tensors.arena import Arena, Layout
from common.tensors.buckets import Bucket, plan_buckets
from common.tensors.optimizers import SGD, Optimizer
from tests.support.groups import Outcome, assert_same_bits, on_threads, outcomes_of, reduced

__all__ = [
    "BUCKETS",
    "RATES",
    "SHAPES",
    "Check",
    "Make",
    "after_sgd",
    "assert_all_equal",
    "buckets_of",
    "errors_of",
    "gradients",
    "initial",
    "layout_of",
    "mean_gradients",
    "new_arena",
    "one_step",
    "run",
    "train",
]

Make = Callable[[int, int], AbstractContextManager[Synchronizer]]
Check = Callable[[Make, int], None]

SHAPES = [
    ("stem", (5, 7)),
    ("bias", (1,)),
    ("middle", (17,)),
    ("wide", (33, 40)),
    ("head", (3, 2, 15)),
    ("last", (16,)),
]
RATES = (0.5, 0.25, 1.0, 0.125, 2.0)  # a learning rate for each step


def layout_of(shapes: Sequence[tuple[str, tuple[int, ...]]] = SHAPES) -> Layout:
    return Layout.of(shapes)


def buckets_of(layout: Layout, limit: int = 512) -> tuple[Bucket, ...]:
    """Several buckets: of one parameter, of more than one, and one larger than the limit."""
    return plan_buckets([s.start for s in layout.slots], layout.length, first_bytes=limit, bucket_bytes=limit)


BUCKETS = len(buckets_of(layout_of()))


def new_arena(synchronizer: Synchronizer, *, layout: Layout | None = None, limit: int = 512) -> Arena:
    """An arena in the synchronizer's own memory, with this rank's initial parameters."""
    layout = layout or layout_of()
    arena = Arena(layout, buckets=buckets_of(layout, limit), empty=synchronizer.empty)
    arena.parameters[:] = initial(layout, synchronizer.rank)
    return arena


def spread(layout: Layout, rng: np.random.Generator) -> np.ndarray:
    """Random values in all slots; zero in the padding between them."""
    flat = np.zeros(layout.length, np.float32)
    for slot in layout.slots:
        flat[slot.start : slot.stop] = rng.standard_normal(slot.size) * 10.0 ** rng.integers(-2, 3, slot.size)
    return flat


def initial(layout: Layout, rank: int) -> np.ndarray:
    return spread(layout, np.random.default_rng([1, rank]))


def gradients(layout: Layout, rank: int, step: int) -> np.ndarray:
    return spread(layout, np.random.default_rng([2, rank, step]))


def mean_gradients(layout: Layout, nranks: int, step: int) -> np.ndarray:
    """The mean over ranks, bucket by bucket in the canonical order."""
    every = [gradients(layout, rank, step) for rank in range(nranks)]
    out = np.empty_like(every[0])
    for bucket in buckets_of(layout):
        part = slice(bucket.start, bucket.stop)
        out[part] = reduced([flat[part] for flat in every], "mean")
    return out


def after_sgd(nranks: int, rates: Sequence[float]) -> np.ndarray:
    """The parameters after one step at each learning rate, by hand."""
    layout = layout_of()
    parameters = initial(layout, 0)
    for step, rate in enumerate(rates):
        parameters = parameters - np.float32(rate) * mean_gradients(layout, nranks, step)
    return parameters


def one_step(synchronizer: Synchronizer, arena: Arena, step: int, rate: float, order: Sequence[int]) -> None:
    """Write this rank's gradients, mark the buckets in this order (others are left unmarked), and finish."""
    arena.gradients[:] = gradients(arena.layout, synchronizer.rank, step)
    for bucket in order:
        synchronizer.mark_ready(bucket)
    synchronizer.finish(rate)


def train(
    make: Make,
    nranks: int,
    *,
    rates: Sequence[float] = RATES,
    order: Callable[[int, int], Sequence[int]] = lambda _rank, _step: range(BUCKETS),
    optimizer: Optimizer | None = None,
) -> list[np.ndarray]:
    """Every rank's parameters after one step at each rate; `order(rank, step)` says how buckets are marked."""

    def body(synchronizer: Synchronizer) -> np.ndarray:
        arena = new_arena(synchronizer)
        synchronizer.attach(arena, optimizer or SGD())
        for step, rate in enumerate(rates):
            one_step(synchronizer, arena, step, rate, order(synchronizer.rank, step))
        return arena.parameters.copy()

    return run(make, nranks, body)


def run(make: Make, nranks: int, body: Callable[[Synchronizer], Any]) -> list[Any]:
    def on_rank(rank: int) -> Any:
        with make(rank, nranks) as synchronizer:
            return body(synchronizer)

    return on_threads(nranks, on_rank)


def errors_of(make: Make, nranks: int, body: Callable[[Synchronizer], Any]) -> list[BaseException | None]:
    def on_rank(rank: int) -> None:
        with make(rank, nranks) as synchronizer:
            body(synchronizer)

    outcomes: list[Outcome[None]] = outcomes_of(nranks, on_rank)
    return [outcome.error for outcome in outcomes]


def assert_all_equal(results: Sequence[np.ndarray], expected: np.ndarray) -> None:
    for result in results:
        assert_same_bits(result, expected)
