"""What every Synchronizer does where ranks differ or leave, as checks of its contract."""

from __future__ import annotations

from typing import Any

from common.errors import LayoutMismatch, PeerError
from common.sync.synchronizer import Synchronizer
from common.tensors.optimizers import SGD, Momentum, Optimizer
from tests.support.synchronizer_steps import (
    BUCKETS,
    SHAPES,
    Make,
    errors_of,
    layout_of,
    new_arena,
    one_step,
)

__all__ = [
    "check_a_missing_parameter_is_named",
    "check_a_name_that_differs_is_named",
    "check_a_rank_that_raises_fails_the_others_with_its_reason",
    "check_a_rank_that_stops_early_is_named",
    "check_a_shape_that_differs_is_named",
    "check_another_optimizer_is_named",
    "check_another_setting_is_named",
    "check_bucket_plans_that_differ_are_refused",
]


def differing(make: Make, nranks: int, *, last: dict[str, Any], optimizer: Optimizer | None = None) -> list[str]:
    """What `attach` says on each rank, where the last rank's arena or optimizer differs from the others'."""

    def body(synchronizer: Synchronizer) -> None:
        odd = synchronizer.rank == nranks - 1
        arena = new_arena(synchronizer, **(last if odd else {}))
        synchronizer.attach(arena, optimizer if odd and optimizer else SGD(learning_rate=0.5))

    errors = errors_of(make, nranks, body)
    assert all(type(error) is LayoutMismatch for error in errors), errors
    return [str(error).lower() for error in errors]


def check_a_shape_that_differs_is_named(make: Make, nranks: int) -> None:
    other = layout_of([*SHAPES[:2], ("middle", (18,)), *SHAPES[3:]])  # of equal length in the arena
    for text in differing(make, nranks, last={"layout": other}):
        assert f"rank {nranks - 1}" in text
        assert "middle" in text
        assert "17" in text
        assert "18" in text


def check_a_name_that_differs_is_named(make: Make, nranks: int) -> None:
    other = layout_of([("trunk", (5, 7)), *SHAPES[1:]])
    for text in differing(make, nranks, last={"layout": other}):
        assert "stem" in text
        assert "trunk" in text


def check_a_missing_parameter_is_named(make: Make, nranks: int) -> None:
    for text in differing(make, nranks, last={"layout": layout_of(SHAPES[:-1])}):
        assert str(len(SHAPES)) in text
        assert str(len(SHAPES) - 1) in text


def check_bucket_plans_that_differ_are_refused(make: Make, nranks: int) -> None:
    for text in differing(make, nranks, last={"limit": 1 << 20}):
        assert "bucket" in text


def check_another_optimizer_is_named(make: Make, nranks: int) -> None:
    for text in differing(make, nranks, last={}, optimizer=Momentum(learning_rate=0.5)):
        assert "sgd" in text
        assert "momentum" in text


def check_another_setting_is_named(make: Make, nranks: int) -> None:
    for text in differing(make, nranks, last={}, optimizer=SGD(learning_rate=0.25)):
        assert "0.5" in text
        assert "0.25" in text


def check_a_rank_that_raises_fails_the_others_with_its_reason(make: Make, nranks: int) -> None:
    def body(synchronizer: Synchronizer) -> None:
        arena = new_arena(synchronizer)
        synchronizer.attach(arena, SGD())
        one_step(synchronizer, arena, 0, 0.5, range(BUCKETS))
        if synchronizer.rank == nranks - 1:
            raise ValueError("boom")
        one_step(synchronizer, arena, 1, 0.5, range(BUCKETS))

    *others, culprit = errors_of(make, nranks, body)
    assert type(culprit) is ValueError
    for error in others:
        assert isinstance(error, PeerError)
        assert f"rank {nranks - 1} left" in str(error)
        assert "ValueError: boom" in str(error)


def check_a_rank_that_stops_early_is_named(make: Make, nranks: int) -> None:
    def body(synchronizer: Synchronizer) -> None:
        arena = new_arena(synchronizer)
        synchronizer.attach(arena, SGD())
        for step in range(1 if synchronizer.rank == 0 else 2):
            one_step(synchronizer, arena, step, 0.5, range(BUCKETS))

    first, *others = errors_of(make, nranks, body)
    assert first is None
    for error in others:
        assert isinstance(error, PeerError)
        assert "rank 0 finished" in str(error)
