"""Copies of arrays that are larger than a core's share of the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from common.kernels.layout import LINE_BYTES
from common.kernels.loader import copy_kernel

__all__ = ["copy"]

LARGE = 8 << 20  # bytes; what is smaller may be in the cache when it is next read


def copy(out: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
    """`out[...] = values`, of arrays of equal shape; large ones past the cache, if there is machine code for it."""
    kernel = copy_kernel() if out.nbytes >= LARGE and out.dtype == values.dtype and both_plain(out, values) else None
    if kernel is None:
        out[...] = values
        return
    to, source = out.reshape(-1).view(np.uint8), values.reshape(-1).view(np.uint8)
    first = -to.ctypes.data % LINE_BYTES
    count = (to.size - first) // LINE_BYTES
    kernel(to.ctypes.data + first, source.ctypes.data + first, count)
    for rest in (slice(first), slice(first + LINE_BYTES * count, None)):
        to[rest] = source[rest]


def both_plain(out: npt.NDArray[Any], values: npt.NDArray[Any]) -> bool:
    return out.shape == values.shape and out.flags.c_contiguous and values.flags.c_contiguous and out.flags.writeable
