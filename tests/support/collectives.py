"""Groups kept open over many tests, their samples in any memory, and what is run over each of them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import pytest

from collective.shared_memory.barrier import CROWDED_BYTES, SHORT_BYTES
from collective.transports.base import PIECE_BYTES
from common.tensors.reduction import DTYPES, OPS
from tests.support.groups import CANONICAL, sample
from tests.support.thorough import LONG

__all__ = [
    "BIG",
    "CASES",
    "NRANKS",
    "PIECE",
    "backends",
    "filled",
    "ones",
    "placed",
    "ranks",
    "sizes_of",
]

NRANKS = (1, 2, 3, 4, 5) if LONG else (1, 2, 3)
EVERY_CASE = [(dtype, op) for dtype in DTYPES for op in OPS if op != "mean" or dtype.startswith("float")]
FEW_CASES = [("float16", "mean"), ("float32", "mean"), ("float64", "sum"), ("int32", "sum"), ("int64", "max")]
CASES = EVERY_CASE if LONG else FEW_CASES  # each takes 3 s to compile on a new machine, for each number of ranks
PIECE = PIECE_BYTES // 4  # float32 elements
BIG = 10_000_001 if LONG else 1_000_003


def sizes_of(nranks):
    """Empty, tiny, around a cache line, prime, around what is short, not divisible, chunks of several pieces."""
    short, crowded = SHORT_BYTES // 4, CROWDED_BYTES // nranks // 64 * 16
    around = {short, short + 1, crowded, crowded + 1}
    return sorted({0, 1, nranks - 1, 15, 16, 17, 1009, 16 * nranks + 1, PIECE * nranks + 4099, *around})


backends = pytest.mark.parametrize("backend", CANONICAL)
ranks = pytest.mark.parametrize("nranks", NRANKS, ids="N{}".format)


pools = WeakKeyDictionary()  # of each group; its memory is freed with it, and not before


def filled(group, size, dtype, shared, *, seed=0):
    """The rank's sample, elsewhere or in the group's memory: there only until the next call."""
    return placed(group, sample(group.rank, size, dtype, seed=seed), shared, at=64 * (seed % 3))


def placed(group, values, shared, *, at=0):
    array = np.empty_like(values)
    if shared:
        pool = pools.get(group)
        if pool is None:
            pool = pools[group] = group.empty(8 * BIG, np.uint8)
        array = pool[at:][: array.nbytes].view(values.dtype)
    array[...] = values
    return array


def ones(size, dtype="float32"):
    return np.ones(size, dtype)
