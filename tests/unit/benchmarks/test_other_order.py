"""The ring that sums in another order: the same means, rounded differently where there is another order."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("paddle")

from benchmarks.training.other_order import OtherOrder
from collective.synchronizer import RingSynchronizer
from tests.support.groups import mesh_groups, on_threads
from tests.support.synchronizer_steps import new_arena


def means(synchronizer: type[RingSynchronizer], nranks: int) -> np.ndarray:
    """What every rank has after one step without an optimizer; the same on all."""
    groups = mesh_groups("shm", nranks)

    def one_rank(rank: int) -> np.ndarray:
        with synchronizer(groups[rank]) as joined:
            arena = new_arena(joined)
            joined.attach(arena, None)
            arena.gradients[:] = np.random.default_rng(rank).standard_normal(arena.gradients.size)
            joined.finish(0.0)
            return arena.gradients.copy()

    first, *others = on_threads(nranks, one_rank)
    assert all(np.array_equal(first, other) for other in others)
    return first


def test_two_ranks_have_one_order() -> None:
    assert np.array_equal(means(OtherOrder, 2), means(RingSynchronizer, 2))


@pytest.mark.parametrize("nranks", [3, 4])
def test_more_ranks_round_differently_in_every_chunk(nranks: int) -> None:
    ours, others = means(RingSynchronizer, nranks), means(OtherOrder, nranks)
    np.testing.assert_allclose(others, ours, rtol=0, atol=1e-6)
    different = others != ours
    assert all(chunk.any() for chunk in np.array_split(different, 2 * nranks))
    assert np.mean(different) > 0.1
