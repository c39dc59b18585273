"""Copying large arrays past the cache, as one call of machine code.

A copy through the cache reads each line that it is about to write, and puts others out: of M bytes 3 M go to and from
memory. Past the cache it is 2 M.
"""

from __future__ import annotations

from typing import Any

from common.kernels.intrinsics import fence, part, stream
from common.kernels.layout import LINE_BYTES

__all__ = ["copy_lines", "stream_lines"]


@part
def stream_lines(to: Any, source: Any, count: Any) -> None:
    """So many lines, to an address that is a multiple of LINE_BYTES. Ordered by `fence` only."""
    for at in range(0, count * LINE_BYTES, LINE_BYTES):
        stream(to + at, source + at)
        stream(to + at + 32, source + at + 32)


def copy_lines(to: Any, source: Any, count: Any) -> None:  # a kernel
    """Likewise, in order."""
    stream_lines(to, source, count)
    fence()  # whoever is told of the copy sees it
