"""Reductions of all dtypes and operations, in the canonical order; those that gradients need are reduction.py's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from common.tensors.canonical_order import runs_of_chunks
from common.tensors.reduction import DTYPES, OPS, Reduction, mean_scale

__all__ = ["BFLOAT16", "MORE_OPS", "is_of_gradients", "reduce_in_order"]

Values = npt.NDArray[Any]

BFLOAT16 = np.dtype(np.uint16)  # NumPy has no such type: these are its bits, and no other arrays are of uint16
COMBINE: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}
MORE_OPS = tuple(COMBINE)


def is_of_gradients(dtype: np.dtype[Any], op: str) -> bool:
    """Whether reduction.py does it, and every scheme's own all-reduce."""
    return dtype.name in DTYPES and op in OPS and not (op == "mean" and dtype.kind == "i")


def reduce_in_order(sources: Sequence[Values], out: Values, op: str, *, start: int, total: int) -> None:
    """Write to `out` the reduction over ranks of elements start..start+out.size of an array of `total` elements.

    Sums of integers wrap, and their mean is the sum's, rounded towards zero; of bool, max and sum are "or", min and
    prod "and". float16 and bfloat16 are combined in float32 and rounded once.

    Args:
        sources: of each rank these elements, 1-D.
        out: 1-D; may be one of the sources.
        op: one of MORE_OPS.

    Raises:
        ValueError: there is no such op, or not of this dtype.
    """
    check(op, out.dtype)
    nranks = len(sources)
    if nranks == 1:
        out[...] = sources[0]
        return
    with np.errstate(all="ignore"):  # what overflows does so in silence, as in compiled loops
        for order, i, j in runs_of_chunks(0, total, nranks, start, start + out.size):
            part = slice(i - start, j - start)
            ordered = [sources[rank][part] for rank in order]
            if is_of_gradients(out.dtype, op):
                Reduction.of(op, out.dtype, nranks).reduce(ordered, [out[part]])
            else:
                out[part] = combined(ordered, op)


def check(op: str, dtype: np.dtype[Any]) -> None:
    if op not in MORE_OPS:
        raise ValueError(f"op must be one of {', '.join(MORE_OPS)} (got {op!r})")
    if op == "mean" and dtype.kind == "b":
        raise ValueError(f"there is no mean of truth values (got {dtype.name}); use max or min")
    if op in ("max", "min") and dtype.kind == "c":
        raise ValueError(f"complex numbers have no {op}imum (got {dtype.name}); they can be summed and multiplied")


def combined(ordered: Sequence[Values], op: str) -> Values:
    combine, total = COMBINE[op], wide(ordered[0])
    for values in ordered[1:]:
        total = combine(total, wide(values))
    if op == "mean" and total.dtype.kind in "iu":
        total = total // len(ordered) + ((total % len(ordered) != 0) & (total < 0))
    elif op == "mean":
        total = total * mean_scale(len(ordered), total.real.dtype)
    return narrow(total, ordered[0].dtype)


def wide(values: Values) -> Values:
    """In the type in which they are combined."""
    if values.dtype == BFLOAT16:
        widened: Values = (values.astype(np.uint32) << 16).view(np.float32)
        return widened
    return values.astype(np.float32) if values.dtype == np.float16 else values


def narrow(values: Values, dtype: np.dtype[Any]) -> Values:
    """In their own type again; to the nearest, ties to even."""
    if dtype != BFLOAT16:
        return values.astype(dtype, copy=False)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(BFLOAT16)
