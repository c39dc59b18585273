"""What the kernel knows of this process's signals."""

from __future__ import annotations

import signal
from pathlib import Path

__all__ = ["is_caught"]


def is_caught() -> bool:
    """Whether the kernel knows of a handler of SIGTERM, Python's or not."""
    (caught,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
