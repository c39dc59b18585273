"""Where in the data another number of ranks goes on: an epoch's samples are those of before, none is left out."""

from __future__ import annotations

from itertools import islice

import pytest

pytest.importorskip("paddle")

from hypothesis import given
from hypothesis import strategies as st

from common.commit.manifest import Manifest
from common.commit.resuming import steps_ahead
from common.trainer.data import rank_indices

COUNT, BATCH = 240, 4
RANKS = st.sampled_from([1, 2, 3, 5, 6])


def steps_per_epoch(nranks: int) -> int:
    return rank_indices(COUNT, batch_size=BATCH, rank=0, nranks=nranks)[0]


def samples(nranks: int, first: int, last: int) -> list[int]:
    """Of these steps, counted in the data."""
    ranks = [rank_indices(COUNT, batch_size=BATCH, rank=rank, nranks=nranks)[1] for rank in range(nranks)]
    return [sample for batches in ranks for batch in islice(batches, first, last) for sample in batch]


def of(nranks: int, step: int, ahead: int = 0) -> Manifest:
    return Manifest(scheme="ring", nranks=nranks, step=step, epoch=0, ahead=ahead, parts={}, parameters_sha256="")


@given(RANKS, RANKS, st.integers(0, 150))
def test_the_rest_of_the_epoch_is_trained_with(before: int, after: int, step: int) -> None:
    manifest = of(before, step)
    place = step - steps_ahead(manifest, after, steps_per_epoch)
    epoch = step // steps_per_epoch(before)
    assert epoch == place // steps_per_epoch(after)
    seen = samples(before, epoch * steps_per_epoch(before), step)
    rest = samples(after, place, (epoch + 1) * steps_per_epoch(after))
    assert set(seen) | set(rest) == set(range(COUNT))
    twice = len(seen) + len(rest) - COUNT
    assert 0 <= twice < after * BATCH


@given(RANKS, RANKS, RANKS, st.integers(0, 60), st.integers(0, 60))
def test_the_number_may_change_again(first: int, second: int, third: int, step: int, more: int) -> None:
    ahead = steps_ahead(of(first, step), second, steps_per_epoch)
    assert steps_ahead(of(second, step + more, ahead), second, steps_per_epoch) == ahead
    place = step + more - ahead  # in the data
    again = step + more - steps_ahead(of(second, step + more, ahead), third, steps_per_epoch)
    assert again // steps_per_epoch(third) == place // steps_per_epoch(second)
    assert 0 <= place % steps_per_epoch(second) * second - again % steps_per_epoch(third) * third < third
