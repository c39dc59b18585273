"""The calls that all ranks make together: their numbers, and the tag by which ranks notice that they differ."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from common.errors import ProtocolError, StaleEpoch
from common.tensors.reduction import DTYPES, OPS

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "BARRIER",
    "BROADCAST",
    "CALLS",
    "FORMAT",
    "GATHERING",
    "GATHER_CHUNKS",
    "OPERATIONS",
    "REDUCE_SCATTER",
    "SHARE",
    "Array",
    "Label",
    "Tag",
]

Array = npt.NDArray[Any]
Label = tuple[int, int, int]  # epoch, step, bucket: what a call is about; ranks that differ must not be mixed up

# A message or note says what it is part of: the number of one of these calls, plus OPERATIONS times the number of the
# reduction or dtype. GATHERING, which nobody calls, is the second half of an all-reduce.
CALLS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "", "gather_chunks", "share")
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, BARRIER, GATHERING, GATHER_CHUNKS, SHARE = range(len(CALLS))
OPERATIONS = 8
REDUCING = ("all_reduce", "reduce_scatter")
EQUAL = "arrays must be of equal size and dtype on all ranks"
KINDS: dict[int, str] = {
    np.dtype(code).num: np.dtype(code).name for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
}


FORMAT = struct.Struct("<IQIHHI")  # of a tag: 24 bytes


class Tag(NamedTuple):
    """What a message is, so that a wrong one is refused: sent with it, compared with what is expected."""

    epoch: int
    step: int
    bucket: int
    phase: int  # a number of CALLS plus OPERATIONS times that of a reduction or dtype
    chunk: int
    piece: int  # of the chunk

    def pack(self) -> bytes:
        return FORMAT.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Tag:
        return cls._make(FORMAT.unpack(data))

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

    def check(self, got: Tag, rank: int) -> None:
        """Raise StaleEpoch or ProtocolError unless `got`, which `rank` sent, is this."""
        if got == self:
            return
        if got.epoch != self.epoch:
            raise StaleEpoch(f"rank {rank} sent a message of epoch {got.epoch}, this is epoch {self.epoch}")
        if str(got) != str(self):
            raise ProtocolError(
                f"rank {rank} called {got}, this rank {self}; all ranks must make the same calls in the same order"
            )
        raise ProtocolError(
            f"rank {rank} sent chunk {got.chunk}, piece {got.piece} in phase {got.phase} of {self}, expected chunk "
            f"{self.chunk}, piece {self.piece} in phase {self.phase}; {EQUAL}"
        )

    def check_size(self, got: int, expected: int, rank: int) -> None:
        """Raise ProtocolError unless the bytes that `rank` has are as many as this rank's."""
        if got != expected:
            raise ProtocolError(f"rank {rank} has {got} bytes where this rank has {expected}, in {self}; {EQUAL}")
