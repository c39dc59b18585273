"""Sums that show whether a program has changed a flat buffer."""

from __future__ import annotations

import numpy as np

from common.tensors.arena import FloatArray
from common.tensors.buckets import pieces_of

__all__ = ["FINGERPRINT", "fingerprint"]

FINGERPRINT = (16, 4096)  # rows and columns of 8 bytes that are looked at together: half a megabyte, which stays in L2


def fingerprint(array: FloatArray) -> int:
    """Sums over all bits, by which a change shows; 5 to 8 GB/s, where a digest would take 1.

    They are taken by rows and by columns, for one sum does not show values that have changed places.
    """
    rows, width = FINGERPRINT
    bits = array[: array.size // 2 * 2].view(np.uint64)
    grid = bits[: bits.size // width * width].reshape(-1, width)
    by_column = np.zeros(width, np.uint64)
    by_row: list[bytes] = []
    for start, stop in pieces_of(0, len(grid), rows):
        by_column += np.add.reduce(grid[start:stop], axis=0)
        by_row.append(np.add.reduce(grid[start:stop], axis=1).tobytes())
    return hash((b"".join(by_row), by_column.tobytes(), bits[grid.size :].tobytes()))
