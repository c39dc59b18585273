"""Rate-limited sockets on one host, without root: the kernel paces what each TCP connection sends.

This is no network: nothing is delayed, queued or lost, and what a rank sends over two connections at once is not
limited as a whole. So only the ring is measured, where a rank sends over one at a time, and its limit's plain sockets.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable

from benchmarks.netlab.cluster import OneHost
from common.errors import UsageError

__all__ = ["MOST_BYTES_PER_S", "PACED", "PacedHost", "pace"]

PACED = {"all_reduce": ("tcp-ring", "loopback-limit"), "broadcast": ("tcp", "loopback-limit")}  # what it covers
RATE_VARIABLE = "GRADSYNC_PACE"  # bytes/s, for the processes that are measured
SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; Python's socket does not name it
MOST_BYTES_PER_S = 2**32 - 2  # all ones would be "without a limit"


class PacedHost(OneHost):
    """This machine, with connections that send at most `rate` bytes/s each.

    Raises:
        UsageError: this kernel cannot.
    """

    def __init__(self, rate: int) -> None:
        self.environment = {RATE_VARIABLE: str(rate)}

    def __enter__(self) -> PacedHost:
        try:
            with socket.socket() as probe:
                _limit(probe, int(self.environment[RATE_VARIABLE]))
        except OSError as exc:
            raise UsageError(f"--pace: this kernel cannot limit a socket's rate ({exc}); --hosts can, as root") from exc
        return self


def pace(connections: Iterable[socket.socket]) -> None:
    """In a process that is measured on a PacedHost, hold these to its rate; elsewhere do nothing."""
    if rate := os.environ.get(RATE_VARIABLE):
        for connection in connections:
            _limit(connection, int(rate))


def _limit(connection: socket.socket, rate: int) -> None:
    connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("I", rate))
