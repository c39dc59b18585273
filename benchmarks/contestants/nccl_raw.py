"""ncclAllReduce as CuPy calls it, with nothing of ours around the call: what NCCL reaches on this machine's GPUs."""

from __future__ import annotations

from typing import Any

from benchmarks.contestants import gradsync

__all__ = ["Rank", "why_absent"]

FLOAT32, SUM = 7, 0  # nccl.h
why_absent = gradsync.why_absent


class Rank(gradsync.Rank):
    """Our group only makes the communicator; the call goes on CuPy's default stream, on which the array is filled."""

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:  # noqa: ARG002
        super().__init__("nccl", rank, nranks, address)
        algorithm: Any = self._group._algorithm
        self._communicator = algorithm._nccl._comm
        self._stream = self.xp.cuda.Stream.null

    def all_reduce(self) -> None:
        where = self.array.data.ptr  # type: ignore[attr-defined]  # a CuPy array's
        self._communicator.allReduce(where, where, self.array.size, FLOAT32, SUM, self._stream.ptr)
        self._stream.synchronize()
