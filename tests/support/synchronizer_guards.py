"""What every Synchronizer does with gradients that are not finite, as checks of its contract."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from common.errors import NonFiniteGradient
from common.sync.guard import Guard
from common.sync.synchronizer import Synchronizer
from common.tensors.arena import Arena
from common.tensors.optimizers import SGD
from tests.support.groups import assert_same_bits, on_threads
from tests.support.synchronizer_steps import BUCKETS, Make, after_sgd, gradients, layout_of, new_arena, run

__all__ = [
    "check_all_that_refuse_at_once_use_the_same_words",
    "check_finite_gradients_whose_squares_overflow_are_used",
    "check_what_is_not_finite_is_refused_by_all",
]


def guarded(synchronizer: Synchronizer) -> Arena:
    """An attached arena whose gradients must be finite."""
    arena = new_arena(synchronizer)
    synchronizer.guard = Guard(arena, synchronizer.rank, refuses=True)
    synchronizer.attach(arena, SGD())
    return arena


def step(synchronizer: Synchronizer, arena: Arena, number: int, changed: dict[str, float]) -> None:
    """One whose gradients have these values at the end of these parameters'."""
    values = gradients(arena.layout, synchronizer.rank, number)
    for slot in arena.layout.slots:
        if slot.name in changed:
            values[slot.stop - 1] = changed[slot.name]
    arena.gradients[:] = values
    for bucket in range(BUCKETS):
        synchronizer.mark_ready(bucket)
    synchronizer.finish(0.5)


def refusals(make: Make, nranks: int, spoiled: Callable[[int], dict[str, float]]) -> set[str]:
    """What the ranks say where the second step has such values; their parameters are as the first has left them."""

    def on_rank(rank: int) -> str:
        try:
            with make(rank, nranks) as synchronizer:
                arena = guarded(synchronizer)
                step(synchronizer, arena, 0, {})
                before = arena.parameters.copy()
                try:
                    step(synchronizer, arena, 1, spoiled(rank))
                finally:
                    assert_same_bits(arena.parameters, before)
        except NonFiniteGradient as exc:
            return str(exc)
        return "it is used"

    return set(on_threads(nranks, on_rank))


def check_what_is_not_finite_is_refused_by_all(make: Make, nranks: int) -> None:
    last = nranks - 1
    assert refusals(make, nranks, lambda rank: {"middle": np.nan} if rank == last else {}) == {
        f"rank {last}'s gradient of parameter middle is not finite at step 1 (1 of 17 values are NaN or infinite); "
        "no parameter was changed: lower the learning rate, clip, or look at the data of that step"
    }


def check_all_that_refuse_at_once_use_the_same_words(make: Make, nranks: int) -> None:
    """Each with a parameter of another bucket."""
    (words,) = refusals(make, nranks, lambda rank: {("last", "stem")[rank % 2]: np.inf})
    assert "is not finite at step 1" in words


def check_finite_gradients_whose_squares_overflow_are_used(make: Make, nranks: int) -> None:
    def body(synchronizer: Synchronizer) -> np.ndarray:
        arena = guarded(synchronizer)
        step(synchronizer, arena, 0, {"wide": 1e30})
        return arena.parameters.copy()

    wide = next(slot for slot in layout_of().slots if slot.name == "wide")
    expected = after_sgd(nranks, [0.5])
    for found in run(make, nranks, body):
        assert found[wide.stop - 1] < -1e29
        found[wide.stop - 1] = expected[wide.stop - 1]
        assert_same_bits(found, expected)
