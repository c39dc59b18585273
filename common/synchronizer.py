"""The one interface between training and a scheme: what a parameter server and a ring have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any

import numpy.typing as npt

from common.arena import Arena, FloatArray
from common.memory import aligned_empty
from common.optimizers import Optimizer

__all__ = ["Synchronizer"]


class Synchronizer(ABC):
    """Keeps the arenas of all ranks equal, step by step.

    Each step: the caller writes gradients into the arena, calls `mark_final` once for every bucket as it becomes
    final (in any order, from any one thread), then `finish`. From `mark_final` on a bucket's gradients belong to
    the synchronizer; when `finish` returns, gradients and parameters belong to the caller again.

    A context manager: leaving it closes it, and after an exception tells the other ranks why. Every blocking
    method has a deadline (`timeout`, seconds) and raises a PeerError naming the rank or server at fault.
    """

    scheme: str  # "local", "ps" or "ring"
    backend: str  # what carries the bytes: "none", "grpc", "shm", "tcp"
    rank: int
    nranks: int
    servers: int = 0

    def empty(self, count: int) -> FloatArray:
        """An uninitialised 1-D float32 array that the scheme can reach without a copy; for arenas."""
        array: FloatArray = aligned_empty(count)
        return array

    @abstractmethod
    def attach(self, arena: Arena, optimizer: Optimizer | None) -> None:
        """Agree with the other ranks on layout and optimizer, and give every arena rank 0's parameters.

        Blocks until all ranks have called it. The arena must outlive the synchronizer. Without an optimizer `finish`
        leaves the mean gradients in the arena, for the caller to make the update.

        Raises:
            LayoutMismatch: ranks disagree; the message names the first difference.
        """

    @abstractmethod
    def mark_final(self, bucket: int) -> None:
        """Bucket number `bucket` of the arena holds this rank's final gradients of the step. Never blocks."""

    @abstractmethod
    def finish(self, learning_rate: float) -> None:
        """End the step: blocks until the arena's parameters are those after the global update, or, where there is no
        optimizer, the arena's gradients are the mean over ranks.

        Buckets not marked are taken as final now. After an update the contents of the gradient buffer are undefined.
        """

    @abstractmethod
    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Every rank's `values` (equal shape and dtype), stacked in rank order; not within a step."""

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """Leave the group and release everything held; a `reason` tells the others that this rank failed.

        Idempotent. Never raises for what the other ranks did.
        """

    def __enter__(self) -> Synchronizer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close("" if kind is None else f"{kind.__name__}: {error}")
