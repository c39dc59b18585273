"""Any order, any pieces, any sizes, two dtypes: the same bits."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.tensors.buckets import Bucket, chunk_bounds
from ps.store.ending import Ending
from ps.store.shards import plan_shards
from tests.support.store_model import (
    EPOCH,
    MIXED,
    NumpySGD,
    canonical_mean,
    deliver,
    gradients_of,
    make_store,
    mixed_plans,
    parameters_after,
    plans,
    play_step,
    rate_of,
)
from tests.support.thorough import examples


@pytest.mark.parametrize("nranks", [1, 2, 3, 4])
@pytest.mark.parametrize("servers", [1, 2, 3, 5, 14, 20])
def test_float64_is_averaged_in_float64_wherever_a_shard_cuts_it(nranks: int, servers: int) -> None:
    chunk_bounds.cache_clear()  # in which a length that is no integer would be found
    stores = [make_store(shard, MIXED, nranks, 224) for shard in plan_shards(224, servers)]
    for _ in range(3):
        for store in stores:
            play_step(store, 224, piece=7)
    together = np.concatenate([store.parameters for store in stores])
    assert together.tobytes() == parameters_after(3, nranks, MIXED, 224).tobytes()


def test_the_model_of_these_tests_tells_float64_from_float32() -> None:
    sources = [gradients_of(rank, 0, 224, tuple(MIXED)) for rank in range(3)]
    mean = canonical_mean(sources, MIXED[0])
    assert mean.dtype == np.float64
    assert (mean != mean.astype(np.float32)).all()
    wide = [source[160:224].view(np.float64) for source in sources]
    np.testing.assert_allclose(mean, np.mean(wide, axis=0), rtol=1e-9, atol=1e-12)


@settings(max_examples=examples(20, 200), deadline=None)
@given(
    st.one_of(plans(), mixed_plans()),
    st.integers(1, 4),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
    st.integers(1, 60),
)
def test_arrival_order_and_piece_sizes_never_matter(
    plan: tuple[int, list[Bucket]], nranks: int, servers: int, random: Random, piece: int
) -> None:
    length, buckets = plan
    stores = [make_store(shard, buckets, nranks, length) for shard in plan_shards(length, servers)]
    work = [(s, r, b) for s in range(servers) for r in range(nranks) for b in range(len(buckets))]
    random.shuffle(work)
    for server, rank, bucket in work:
        deliver(stores[server], rank, bucket, length, piece=piece)
    ranks = list(range(nranks))
    random.shuffle(ranks)
    for store in stores:
        assert [store.commit(rank, EPOCH, 0, Ending(rate_of(0))) for rank in ranks] == [False] * (nranks - 1) + [True]
        store.update(NumpySGD(store))
    together = np.concatenate([store.parameters for store in stores])
    assert together.tobytes() == parameters_after(1, nranks, buckets, length).tobytes()
