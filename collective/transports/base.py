"""What a transport is: it moves arrays between ranks, as messages, and knows nothing of sums."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy.typing as npt

from collective.call_tags import Array, Tag
from common.system.memory import aligned_empty

__all__ = ["PIECE_BYTES", "Transport"]

PIECE_BYTES = 256 * 1024  # of a chunk, in one message, unless a transport says otherwise: stays in L2 until it is added


class Transport(ABC):
    """One rank's connections to others. A message is a contiguous array; messages from one rank arrive in the order
    sent.

    Blocking methods wait at most the group's timeout and raise PeerLost or PeerStalled, naming the rank at fault.
    """

    rank: int
    nranks: int
    piece_bytes = PIECE_BYTES  # what a long array is best cut into

    def empty(self, count: int, dtype: npt.DTypeLike) -> Array:
        """An uninitialised 1-D array, 64-byte aligned, that `send` can pass on without a copy."""
        return aligned_empty(count, dtype)

    @abstractmethod
    def send(self, rank: int, array: Array, tag: Tag) -> None:
        """Start sending to `rank`; does not wait for it.

        The array must keep its contents until `flush`, or until data that depends on it has come back.
        """

    @abstractmethod
    def receive(self, rank: int, out: Array, tag: Tag) -> None:
        """Write that rank's next message to `out`, which is spoiled if it is not the expected one.

        Raises:
            StaleEpoch, ProtocolError: it is not, or was damaged on its way.
        """

    @abstractmethod
    def flush(self) -> None:
        """Block until everything sent may be overwritten."""

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """Leave; a `reason` tells the other ranks that this one failed. Idempotent, never raises."""
