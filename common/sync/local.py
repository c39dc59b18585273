"""The scheme of one rank: no communication; the reference that the others are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from common.commit.slices import Slice, cut
from common.sync.synchronizer import Synchronizer
from common.sync.trace import FINISH
from common.tensors.arena import Arena
from common.tensors.optimizers import Optimizer
from common.tensors.updater import make_flat_updater

__all__ = ["LocalSynchronizer"]


class LocalSynchronizer(Synchronizer):
    """Applies the optimizer to the rank's own gradients."""

    scheme, backend, rank, nranks = "local", "none", 0, 1

    def attach(self, arena: Arena, optimizer: Optimizer | None) -> None:
        self._length = arena.layout.length
        self._updater = make_flat_updater(optimizer, arena.parameters, arena.gradients)
        self._buckets, self._step = range(len(arena.buckets)), 0

    def mark_ready(self, bucket: int) -> None:
        pass

    def finish(self, learning_rate: float) -> None:
        with self.trace.span(FINISH):
            if any(self.guard.look(bucket, self._step) for bucket in self._buckets):
                raise self.guard.error()
            with self.trace.span("update"):
                self._updater.step(learning_rate)
        self._step += 1

    def optimizer_slices(self, *, everyone: bool = False) -> list[Slice]:  # noqa: ARG002 - there is one
        return [Slice(0, self._length, self._updater.arrays())]

    def load_optimizer(self, slices: Sequence[Slice]) -> None:
        self._updater.load(cut(slices, 0, self._length).arrays)

    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.array(values[None])

    def another(self) -> LocalSynchronizer:
        return LocalSynchronizer()

    def close(self, reason: str = "") -> None:
        pass
