"""What a store refuses, and that nothing has changed by it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from common.errors import GradSyncError, LayoutMismatch, ProtocolError, StaleEpoch
from ps.store.ending import Ending
from ps.store.shards import Shard
from ps.store.step_state import StepState
from tests.support.store_model import (
    EPOCH,
    LENGTH,
    MIXED,
    PLAN,
    deliver,
    gradients_of,
    make_store,
    one,
    play_step,
    refused,
)

ILLEGAL: dict[str, tuple[type[GradSyncError], str, Callable[[StepState], object]]] = {
    "push of an old epoch": (StaleEpoch, "epoch 2.* epoch 3", lambda s: s.push(0, 2, 0, 0, 48, one)),
    "commit of an old epoch": (StaleEpoch, "epoch 2.* epoch 3", lambda s: s.commit(0, 2, 0, Ending(0.1))),
    "push of a later step": (ProtocolError, "step 1.*step 0", lambda s: s.push(0, EPOCH, 1, 0, 48, one)),
    "commit of a later step": (ProtocolError, "step 1.*step 0", lambda s: s.commit(0, EPOCH, 1, Ending(0.1))),
    "bucket that is not": (ProtocolError, "bucket 3 of 3", lambda s: s.push(0, EPOCH, 0, 3, 0, one)),
    "gap": (ProtocolError, "49..50 of bucket 0.*from 48", lambda s: s.push(0, EPOCH, 0, 0, 49, one)),
    "element of the bucket before": (ProtocolError, "47..48", lambda s: s.push(0, EPOCH, 0, 0, 47, one)),
    "beyond the bucket": (ProtocolError, "up to 70", lambda s: s.push(0, EPOCH, 0, 0, 48, np.ones(23, np.float32))),
    "commit without pushes": (ProtocolError, "after 0 of 70", lambda s: s.commit(0, EPOCH, 0, Ending(0.1))),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_cannot_be_right_is_refused(name: str) -> None:
    kind, text, act = ILLEGAL[name]
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    with refused(store, kind, text=f"rank 0 .*{text}"):
        act(store)


def test_a_part_of_an_element_is_refused() -> None:
    store = make_store(Shard(0, 224), MIXED, 2, 224)
    with refused(store, ProtocolError, text="rank 1 pushed a part of an element, 7 words, of bucket 1 at step 0"):
        store.push(1, EPOCH, 0, 1, 96, np.ones(7, np.float32))


def test_an_element_twice_is_refused() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    store.push(1, EPOCH, 0, 0, 48, one)
    with refused(store, ProtocolError, text="rank 1 pushed words 48..49.*expected them from 49"):
        store.push(1, EPOCH, 0, 0, 48, one)


def test_a_whole_bucket_twice_is_refused() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 1, LENGTH)
    deliver(store, 0, 2, LENGTH)
    with refused(store, ProtocolError):
        store.push(0, EPOCH, 0, 2, 0, gradients_of(0, 0, LENGTH)[:16])


def test_a_push_outside_the_shard_is_refused() -> None:
    store = make_store(Shard(16, 48), PLAN, 1, LENGTH)
    with refused(store, ProtocolError):
        store.push(0, EPOCH, 0, 2, 0, one)
    with refused(store, ProtocolError):
        store.push(0, EPOCH, 0, 1, 16, np.ones(33, np.float32))


def test_a_commit_with_one_element_missing_is_refused() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 1, LENGTH)
    deliver(store, 0, 0, LENGTH)
    deliver(store, 0, 1, LENGTH)
    store.push(0, EPOCH, 0, 2, 0, np.ones(15, np.float32))
    with refused(store, ProtocolError, text="rank 0 committed step 0 after 69 of 70 words"):
        store.commit(0, EPOCH, 0, Ending(0.1))


def committed_by_rank_0() -> StepState:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    for rank in (0, 1):
        for bucket in range(3):
            deliver(store, rank, bucket, LENGTH)
    store.commit(0, EPOCH, 0, Ending(0.1))
    return store


def test_anything_after_a_commit_is_refused() -> None:
    store = committed_by_rank_0()
    with refused(store, ProtocolError, text="rank 0 sent more after committing step 0"):
        store.push(0, EPOCH, 0, 0, 70, np.empty(0, np.float32))
    with refused(store, ProtocolError, text="rank 0 sent more after committing step 0"):
        store.commit(0, EPOCH, 0, Ending(0.1))


def test_another_learning_rate_is_refused_naming_both() -> None:
    store = committed_by_rank_0()
    with refused(store, LayoutMismatch, text=r"rank 1 has learning rate 0\.2 at step 0, rank 0 has 0\.1"):
        store.commit(1, EPOCH, 0, Ending(0.2))


def test_the_step_before_is_refused_after_an_update() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 1, LENGTH)
    play_step(store, LENGTH)
    with refused(store, ProtocolError, text="rank 0 sent step 0, this is step 1"):
        store.commit(0, EPOCH, 0, Ending(0.1))
    with refused(store, ProtocolError, text="rank 0 sent step 0, this is step 1"):
        store.push(0, EPOCH, 0, 2, 0, one)
