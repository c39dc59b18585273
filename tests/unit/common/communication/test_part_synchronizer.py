"""A model that some of the ranks average among themselves: the mean is theirs, in the canonical order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

from common.errors import LayoutMismatch
from common.tensors.arena import Arena, Layout
from tests.support.groups import assert_same_bits, reduced
from tests.support.synchronizer_contract import CHECKS, name_of
from tests.support.thread_messenger import communicating, errors_communicating, thread_ranks

MEMBERS = (1, 2, 4)  # of five


def part_of(dist: Any) -> Any:
    carrier = dist.new_group(list(MEMBERS)).process_group
    return carrier and carrier.synchronizer


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_contract(check: Callable[..., None]) -> None:
    from common.paddle_api.communication.communication import Communication

    ranks = thread_ranks(5)
    check(lambda rank, _: part_of(Communication(lambda: ranks[MEMBERS[rank]], lambda: False)), len(MEMBERS))


@pytest.mark.parametrize("size", [1, 2, 3, 17, 100_003])
def test_members_have_the_mean_of_their_gradients_and_the_firsts_parameters(size: int) -> None:
    def gradients(rank: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng([rank, size]).standard_normal(size).astype(np.float32)

    def body(dist: Any) -> Any:
        if (part := part_of(dist)) is None:
            return None
        layout = Layout.of([("weight", [size])])
        arena = Arena(layout, buckets=layout.plan(first_bytes=64, bucket_bytes=4096))
        rank = MEMBERS[part.rank]
        arena.parameters[:] = rank
        part.attach(arena, None)
        where = slice(size)
        arena.gradients[where] = gradients(rank)
        part.finish(0.0)
        return arena.parameters[where].tolist(), arena.gradients[where].copy()

    found = communicating(5, body)
    assert (found[0], found[3]) == (None, None)
    expected = reduced([gradients(rank) for rank in MEMBERS], "mean")
    for rank in MEMBERS:
        assert found[rank][0] == [1.0] * size
        assert_same_bits(found[rank][1], expected)


def test_members_with_different_models_are_named() -> None:
    def body(dist: Any) -> None:
        if part := part_of(dist):
            layout = Layout.of([("weight", [2 + part.rank // 2])])
            part.attach(Arena(layout, buckets=layout.plan(first_bytes=64, bucket_bytes=64)), None)

    errors = errors_communicating(5, body)
    assert isinstance(errors[4], LayoutMismatch)
    assert str(errors[4]).startswith("rank 4 and rank 1 disagree on the model's parameters; give all members")
