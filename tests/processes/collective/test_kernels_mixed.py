"""A rank with compiled loops and a rank without compute the same bits."""

from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest

from collective.group import Group
from collective.shared_memory.staged import PAST_BYTES
from common.kernels import loader
from common.kernels.names import WAYS
from tests.support.groups import RankProcesses, reduced, sample, say

pytestmark = pytest.mark.processes

# Short, several pieces of what is staged, and so many that results are copied past the cache.
SIZES = (1_000, 300_001, PAST_BYTES // 4 + 1_001)


def reduces_with_and_without(group: Group) -> None:
    if group.rank == 0:  # after the ranks have agreed how to meet
        os.environ[loader.KERNELS_VARIABLE] = "off"
    digest = hashlib.sha256()
    for size in SIZES:
        for makers in ((np.empty, np.empty), (group.empty, group.empty), (np.empty, group.empty)):
            array = makers[group.rank](size + 1, np.float32)[1:]  # no multiple of a cache line
            array[...] = sample(group.rank, size, "float32")
            group.all_reduce(array, "mean")
            digest.update(array.tobytes())
    say(digest=digest.hexdigest(), compiled=any(path.name.startswith(WAYS) for path in loader._mappings))


def test_a_rank_with_compiled_loops_and_one_without() -> None:
    expected = hashlib.sha256()
    for size in SIZES:
        expected.update(reduced([sample(rank, size, "float32") for rank in range(2)], "mean").tobytes() * 3)
    with RankProcesses(reduces_with_and_without, 2, "shm") as ranks:
        told = [ranks.hear(rank, "digest") for rank in range(2)]
    assert [message["compiled"] for message in told] == [False, True]
    assert [message["digest"] for message in told] == [expected.hexdigest()] * 2
