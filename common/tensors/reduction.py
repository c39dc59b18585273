"""The one order of summation that makes all schemes compute the same bits.

Chunk c of a bucket is summed starting at rank c+1 (mod N), then c+2, ..., ending at c, in the arrays' own type
(float16: in float32, rounded once at the end), and then multiplied by 1/N in that type. A ring does this by the
way it travels; a parameter server and the ranks of one host do it by this module. Arrival order never matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from common.tensors.buckets import chunk_bounds, pieces_of

__all__ = ["DTYPES", "OPS", "Reduction", "canonical_ranks", "mean_scale", "reduce_bucket", "reduce_piece"]

OPS = ("sum", "mean", "max")
DTYPES = ("float32", "float64", "float16", "int32", "int64")

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


@dataclass(frozen=True, eq=False)
class Reduction:
    """What one op means for arrays of one dtype; made by `Reduction.of`, which returns the same object again.

    sum and mean: integers wrap, there is no mean of them. max: NaN if any rank's is. A NaN's sign and payload are not
    defined: the processor takes the first operand's, and compilers exchange operands.
    """

    number: int  # another one for every dtype and op: ranks that differ must not add up
    combine: np.ufunc  # of a partial result and the next rank's values, in this order
    partial: np.dtype[Any]  # of partial results
    widens: bool  # whether that is not the arrays' own dtype
    scale: npt.NDArray[Any] | None  # what the complete sum is multiplied by, 0-d: quicker than a NumPy scalar

    @staticmethod
    @cache
    def of(op: str, dtype: np.dtype[Any], nranks: int) -> Reduction:
        """
        Raises:
            ValueError, TypeError: the op or dtype is none of OPS and DTYPES, or it is a mean of integers.
        """
        if op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)} (got {op!r})")
        if dtype.name not in DTYPES or not dtype.isnative:
            got = dtype.name if dtype.isnative else f"{dtype.str}, the other byte order"
            raise TypeError(f"dtype must be one of {', '.join(DTYPES)} (got {got})")
        if op == "mean" and dtype.kind == "i":
            raise ValueError(f"the mean of integers is not an integer (got {dtype.name}); use op='sum'")
        partial: np.dtype[Any] = np.dtype(np.float32) if dtype == np.float16 else dtype
        return Reduction(
            number=DTYPES.index(dtype.name) * len(OPS) + OPS.index(op),
            combine=np.maximum if op == "max" else np.add,
            partial=partial,
            widens=partial != dtype,
            scale=np.array(mean_scale(nranks, partial)) if op == "mean" else None,
        )

    def reduce(
        self, inputs: Sequence[npt.NDArray[Any]], outputs: Sequence[npt.NDArray[Any]], scratch: npt.NDArray[Any]
    ) -> None:
        """Write the complete result to every output.

        Args:
            inputs: the values of two or more ranks, 1-D and of equal length, in canonical order.
            outputs: likewise 1-D. The first may be the first or second input itself and must not overlap the
                others; the following ones may be anything, for they are written last.
            scratch: of dtype `partial` and no shorter; used where partial results are wider than the arrays.
        """
        if self.widens:
            total = scratch[: inputs[0].size]
            total[...] = inputs[0]
            self.combine(total, inputs[1], out=total)
        else:
            total = outputs[0]
            self.combine(inputs[0], inputs[1], out=total)
        for following in inputs[2:]:
            self.combine(total, following, out=total)
        if self.scale is not None:
            np.multiply(total, self.scale, out=total)
        for out in outputs:
            if out is not total:
                out[...] = total


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
    if nranks == 1:
        out[start:stop] = sources[0][start:stop]
        return
    total, scale = Reduction.of("sum", out.dtype, nranks), mean_scale(nranks, out.dtype)
    scratch = np.empty(BLOCK, out.dtype)  # for `out` may be a source that is not the first
    for order, a, b in runs_of_chunks(bucket_start, bucket_length, nranks, start, stop):
        for i, j in pieces_of(a, b, BLOCK):
            total.reduce([sources[rank][i:j] for rank in order], (scratch[: j - i],), scratch)
            np.multiply(scratch[: j - i], scale, out=out[i:j])


def reduce_piece(
    sources: Sequence[npt.NDArray[Any]],
    out: npt.NDArray[Any],
    *,
    bucket_start: int,
    bucket_length: int,
    start: int,
    stop: int,
) -> None:
    """As `reduce_bucket`, but `out` (float32 or float64) has stop - start elements and is none of the sources: sums are
    made there, all at once. Two threads that do this would wait for each other's GIL more often with smaller blocks."""
    nranks = len(sources)
    if nranks == 1:
        out[...] = sources[0][start:stop]
        return
    mean = Reduction.of("mean", out.dtype, nranks)
    for order, i, j in runs_of_chunks(bucket_start, bucket_length, nranks, start, stop):
        mean.reduce([sources[rank][i:j] for rank in order], (out[i - start : j - start],), out)


def runs_of_chunks(
    bucket_start: int, bucket_length: int, nranks: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """(ranks in the order of summation, first, last) of what lies of each chunk in start..stop."""
    for chunk, (a, b) in enumerate(chunk_bounds(bucket_length, nranks)):
        first, last = max(bucket_start + a, start), min(bucket_start + b, stop)
        if first < last:
            yield canonical_ranks(chunk, nranks), first, last
