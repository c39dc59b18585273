"""A log that the launcher shows on its own standard output as it grows."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["ShownLog"]

PIECE_BYTES = 1 << 16


class ShownLog:
    """What is written to this log from now on. Nobody writes slower for it: the process that writes has its file.

    Args:
        path: of a log that is there.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)

    def show(self) -> None:
        """Write what is new to standard output; nothing more once nobody reads that any longer."""
        with suppress(OSError, ValueError):  # as when the program is the left side of `| head`
            while piece := self._file.read(PIECE_BYTES):
                sys.stdout.flush()
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()

    def close(self) -> None:
        """Show the rest, and let go of the file."""
        self.show()
        self._file.close()
