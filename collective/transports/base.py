"""What a transport is: it moves bytes from each rank to the next one in the ring, and knows nothing of sums."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import ProtocolError, StaleEpoch
from common.system.memory import aligned_empty
from common.tensors.reduction import DTYPES, OPS

__all__ = ["CALLS", "OPERATIONS", "SEGMENT_BYTES", "Array", "Tag", "Transport"]

Array = npt.NDArray[Any]
SEGMENT_BYTES = 256 * 1024  # of the largest message, unless a transport says otherwise: stays in L2 until it is added


# What ranks call, by the number that messages carry (collective/algorithms/base.py).
CALLS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "", "gather_chunks", "have_in_common")
REDUCING = ("all_reduce", "reduce_scatter")
OPERATIONS = 8
EQUAL = "arrays must be of equal size and dtype on all ranks"
KINDS: dict[int, str] = {
    np.dtype(code).num: np.dtype(code).name for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
}


@dataclass(frozen=True)
class Tag:
    """What a message is, so that a wrong one is refused: sent with it, compared with what is expected."""

    epoch: int
    step: int
    bucket: int
    phase: int  # which part of which algorithm; see Group
    chunk: int
    segment: int

    FORMAT = struct.Struct("<IQIHHI")  # 24 bytes

    def pack(self) -> bytes:
        return self.FORMAT.pack(*astuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> Tag:
        return cls(*cls.FORMAT.unpack(data))

    def __str__(self) -> str:
        """The call that it is part of.

        >>> str(Tag(0, 12, 3, OPERATIONS * 1, 0, 0)), str(Tag(0, 5, 0, 3 + OPERATIONS, 1, 0))
        ('all_reduce (mean of float32) of step 12, bucket 3', 'broadcast (of int8) from rank 1 of step 5, bucket 0')
        """
        number, call = divmod(self.phase, OPERATIONS)
        name = CALLS[call] if call < len(CALLS) else ""
        if name in REDUCING and number < len(DTYPES) * len(OPS):
            name += f" ({OPS[number % len(OPS)]} of {DTYPES[number // len(OPS)]})"
        elif name and name != "barrier":
            name += f" (of {KINDS.get(number, f'type {number}')})"
        if name.startswith("broadcast"):
            name += f" from rank {self.chunk}"
        return f"{name or f'phase {self.phase}'} of step {self.step}, bucket {self.bucket}"

    def check(self, got: Tag, peer: int) -> None:
        """Raise StaleEpoch or ProtocolError unless `got`, which `peer` sent, is this."""
        if got == self:
            return
        if got.epoch != self.epoch:
            raise StaleEpoch(f"rank {peer} sent a message of epoch {got.epoch}, this is epoch {self.epoch}")
        if str(got) != str(self):
            raise ProtocolError(
                f"rank {peer} called {got}, this rank {self}; all ranks must make the same calls in the same order"
            )
        raise ProtocolError(
            f"rank {peer} sent chunk {got.chunk}, segment {got.segment} in phase {got.phase} of {self}, expected chunk "
            f"{self.chunk}, segment {self.segment} in phase {self.phase}; {EQUAL}"
        )

    def check_size(self, got: int, expected: int, peer: int) -> None:
        """Raise ProtocolError unless the bytes that `peer` has are as many as this rank's."""
        if got != expected:
            raise ProtocolError(f"rank {peer} has {got} bytes where this rank has {expected}, in {self}; {EQUAL}")


class Transport(ABC):
    """One rank's two neighbours in the ring: what it sends goes to rank+1, what it receives comes from rank-1.

    Messages arrive in the order sent. A message is a contiguous array of at most `segment_bytes` bytes. Blocking
    methods wait at most `timeout` seconds and raise PeerLost or PeerStalled, naming the rank at fault.
    """

    name: str
    rank: int
    nranks: int
    segment_bytes = SEGMENT_BYTES

    @property
    def left(self) -> int:
        return (self.rank - 1) % self.nranks

    @property
    def right(self) -> int:
        return (self.rank + 1) % self.nranks

    def empty(self, count: int, dtype: npt.DTypeLike) -> Array:
        """An uninitialised 1-D array, 64-byte aligned, that `send` can pass on without a copy."""
        return aligned_empty(count, dtype)

    @abstractmethod
    def send(self, array: Array, tag: Tag) -> None:
        """Start sending; blocks only while too many messages are under way.

        The array must keep its contents until `flush`, or until data that depends on it has come back.
        """

    @abstractmethod
    def receive(self, like: Array, tag: Tag) -> Array:
        """The next message as an array of `like`'s dtype and size. It is the transport's, to be read only, and valid
        until the next `receive` or `receive_into`."""

    def receive_into(self, out: Array, tag: Tag) -> None:
        """The next message, written to `out`."""
        np.copyto(out, self.receive(out, tag))

    @abstractmethod
    def flush(self) -> None:
        """Block until everything sent may be overwritten."""

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """Leave; a `reason` tells the other ranks that this one failed. Idempotent, never raises."""
