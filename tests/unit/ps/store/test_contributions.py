"""What is averaged of gradients that are read where trainers have them."""

from __future__ import annotations

import numpy as np
import pytest

from common.tensors.arena import FloatArray
from common.tensors.buckets import Bucket
from ps.store.contributions import Contributions
from ps.store.shards import Shard

LENGTH, NRANKS = 64, 3
BUCKETS = [Bucket(0, 32, "float32"), Bucket(32, 32, "float64")]


def values_of(rank: int, seed: int) -> FloatArray:
    rng = np.random.default_rng([rank, seed])
    both = rng.standard_normal(32).astype(np.float32), rng.standard_normal(16).view(np.float32)
    return np.concatenate(both)


def averages(contributions: Contributions) -> list[bytes]:
    """Of every piece."""
    found = []
    for piece in contributions.pieces():
        out = np.empty(piece.stop - piece.start, np.float32)
        contributions.average(piece, out)
        found.append(out.tobytes())
    return found


def delivered(seed: int) -> Contributions:
    """Pushed rather than read in place."""
    contributions = Contributions(Shard(0, LENGTH), BUCKETS, range(NRANKS), piece=16)
    for rank in range(NRANKS):
        for bucket in BUCKETS:
            words = values_of(rank, seed)[bucket.start : bucket.stop]
            contributions.add(rank, 0, BUCKETS.index(bucket), bucket.start, words)
    return contributions


@pytest.mark.parametrize("again", ["other values", "other memory"])
def test_gradients_are_read_anew_each_time(again: str) -> None:
    contributions = Contributions(Shard(0, LENGTH), BUCKETS, range(NRANKS), piece=16)
    arrays = [values_of(rank, 0) for rank in range(NRANKS)]
    for rank, array in enumerate(arrays):
        contributions.read_in_place(rank, 0, array)
    assert averages(contributions) == averages(delivered(0))
    for rank, array in enumerate(arrays):
        if again == "other values":
            array[...] = values_of(rank, 1)
        else:
            contributions.read_in_place(rank, 1, values_of(rank, 1))
    assert averages(contributions) == averages(delivered(1))
