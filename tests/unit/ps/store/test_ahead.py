"""Pieces that are updated as they come once all have committed ahead."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import ProtocolError
from ps.store.ending import Ending
from ps.store.shards import Shard
from tests.support.groups import assert_same_bits
from tests.support.store_model import (
    AGAIN,
    AVERAGE,
    EPOCH,
    LENGTH,
    PLAN,
    REPLACED,
    NumpySGD,
    deliver,
    end,
    gradients_of,
    in_pieces,
    initial_parameters,
    make_store,
    parameters_after,
    push_all,
    rate_of,
    refused,
    updated,
)


def test_pieces_are_updated_as_they_come_once_all_have_committed() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH, piece=16)
    updater, before, after = in_pieces(store), initial_parameters(LENGTH), parameters_after(1, 2, PLAN, LENGTH)
    assert [(p.start, p.stop) for p in store.contributions.pieces()] == [
        (48, 64),
        (64, 70),
        (16, 32),
        (32, 48),
        (0, 16),
    ]

    def push(rank: int, bucket: int, start: int, stop: int) -> list[tuple[int, int]]:
        """What is updated with it."""
        if store.push(rank, EPOCH, 0, bucket, start, gradients_of(rank, 0, LENGTH)[start:stop]):
            if not store.committed:
                store.reduce(bucket)
            return store.update_pieces(updater) if store.is_due(in_pieces=True) else []
        return []

    assert push(0, 1, 16, 48) == []
    assert push(1, 1, 16, 33) == []  # averaged, but rank 1 has promised nothing
    assert store.commit(0, EPOCH, 0, Ending(rate_of(0)), ahead=True) is False
    assert not store.is_due(in_pieces=True)
    assert store.commit(1, EPOCH, 0, Ending(rate_of(0)), ahead=True) is False
    assert store.is_due(in_pieces=True)
    assert not store.is_due()
    assert store.update_pieces(updater) == [(16, 32)]
    assert_same_bits(store.parameters, np.concatenate([before[:16], after[16:32], before[32:]]))
    assert push(1, 0, 48, 70) == []
    assert push(1, 2, 0, 16) == []
    assert push(1, 1, 33, 48) == [(32, 48)]
    assert (store.waiting_for(), store.begun, store.step) == ([0], True, 0)
    assert push(0, 0, 48, 70) == [(48, 70)]
    assert push(0, 2, 0, 8) == []
    assert push(0, 2, 8, 16) == [(0, 16)]
    assert (store.waiting_for(), store.begun, store.step) == ([0, 1], False, 1)
    assert_same_bits(store.parameters, after)


def test_an_updater_of_the_whole_waits_for_all_that_was_committed_ahead() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH, piece=16)
    for rank in range(2):
        assert store.commit(rank, EPOCH, 0, Ending(rate_of(0)), ahead=True) is False
    deliver(store, 0, 0, LENGTH)
    deliver(store, 1, 0, LENGTH)
    assert not store.is_due()
    push_all(store)
    assert store.is_due()
    store.update(NumpySGD(store))
    assert_same_bits(store.parameters, parameters_after(1, 2, PLAN, LENGTH))


@pytest.mark.parametrize("ending", [AVERAGE, AGAIN, REPLACED])
def test_only_an_update_by_new_gradients_is_committed_ahead(ending: Ending) -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    with refused(
        store, ProtocolError, text="^rank 1 committed step 0 ahead, which is for updates by new gradients only$"
    ):
        store.commit(1, EPOCH, 0, ending, ahead=True)


def test_an_updater_of_pieces_uses_an_average_again() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH, piece=16)
    push_all(store)
    end(store, AVERAGE)
    for rank in range(2):
        store.commit(rank, EPOCH, 1, AGAIN)
    assert store.is_due(in_pieces=True)
    assert store.update_pieces(in_pieces(store)) == [(48, 70), (16, 48), (0, 16)]
    assert_same_bits(store.parameters, updated(initial_parameters(LENGTH), 0, 0.1, 2, PLAN))


def test_nothing_more_is_no_further_piece() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 1, LENGTH, piece=16)
    gradients = gradients_of(0, 0, LENGTH)
    store.commit(0, EPOCH, 0, Ending(rate_of(0)), ahead=True)
    assert store.push(0, EPOCH, 0, 1, 16, gradients[16:32])
    assert not store.push(0, EPOCH, 0, 1, 32, gradients[:0])
