"""Ranks that come late by any time, and so while others look, yield, sleep or are just about to, spoil no call."""

from __future__ import annotations

import time

import numpy as np
import pytest

from collective.group import Group
from tests.support.groups import RankProcesses, assert_same_bits, reduced, sample, say
from tests.support.thorough import examples

pytestmark = pytest.mark.processes

CALLS = examples(300, 5000)
SIZES = (1, 1000, 30_000, 200_000)  # short, and some that are passed through shared memory in pieces
LATE_S = (0.0, 0.0, 2e-6, 1e-5, 5e-5, 2e-4, 2e-3)


def reduces_late(group: Group) -> None:
    sizes, late = np.random.default_rng(1), np.random.default_rng([2, group.rank])
    for i in range(CALLS):
        size = int(sizes.choice(SIZES, p=(0.3, 0.5, 0.1, 0.1)))
        array = sample(group.rank, size, "float32", seed=i)
        until = time.perf_counter() + late.choice(LATE_S)
        while time.perf_counter() < until:
            pass
        group.all_reduce(array, "sum")
        assert_same_bits(array, reduced([sample(rank, size, "float32", seed=i) for rank in range(group.nranks)], "sum"))
    say(calls=CALLS)


@pytest.mark.parametrize("nranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_late_ranks(nranks: int) -> None:
    with RankProcesses(reduces_late, nranks, "shm") as ranks:
        assert [ranks.hear(rank, "calls")["calls"] for rank in range(nranks)] == [CALLS] * nranks
