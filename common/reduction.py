"""The one order of summation that makes all schemes compute the same bits.

Chunk c of a bucket is summed starting at rank c+1 (mod N), then c+2, ..., ending at c, in the arrays' own type,
and then multiplied by 1/N in that type. A ring does this by the way it travels; a parameter server does it by
this module. Arrival order never matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from common.buckets import chunk_bounds, segments

__all__ = ["canonical_ranks", "mean_scale", "reduce_bucket"]

BLOCK = 32_768  # elements summed at a time: 128 KiB of float32, so that the running sum stays in L2


def canonical_ranks(chunk: int, nranks: int) -> tuple[int, ...]:
    """The ranks in the order in which chunk `chunk` is summed.

    >>> canonical_ranks(1, 4)
    (2, 3, 0, 1)
    """
    return tuple((chunk + 1 + i) % nranks for i in range(nranks))


def mean_scale(nranks: int, dtype: npt.DTypeLike) -> Any:
    """1/N rounded once to `dtype`; what a sum is multiplied by to become a mean."""
    scale: Any = np.asarray(1.0 / nranks).astype(dtype)[()]
    return scale


def reduce_bucket(
    sources: Sequence[npt.NDArray[Any]],
    out: npt.NDArray[Any],
    *,
    bucket_start: int,
    bucket_length: int,
    start: int,
    stop: int,
) -> None:
    """Write the mean over ranks of elements start..stop of a bucket into the same elements of `out`.

    Args:
        sources: one 1-D array a rank, indexed like the arena.
        out: 1-D, indexed like the arena; may be one of the sources.
        bucket_start, bucket_length: the whole bucket, which fixes the chunks, also where only a part of it
            (one server's slice) is reduced.
    """
    nranks = len(sources)
    scale = mean_scale(nranks, out.dtype)
    for chunk, (a, b) in enumerate(chunk_bounds(bucket_length, nranks)):
        order = canonical_ranks(chunk, nranks)
        for i, j in segments(max(bucket_start + a, start), min(bucket_start + b, stop), BLOCK):
            total = sources[order[0]][i:j].copy()
            for rank in order[1:]:
                total += sources[rank][i:j]
            np.multiply(total, scale, out=out[i:j])
