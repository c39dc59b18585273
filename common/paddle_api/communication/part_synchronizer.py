"""The synchronizer of a model that some of the ranks average among themselves, whatever the scheme."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import LayoutMismatch
from common.paddle_api.communication.exchange import Exchange
from common.sync.overlap import BucketRunner
from common.sync.synchronizer import Synchronizer
from common.tensors.arena import Arena
from common.tensors.optimizers import Optimizer
from common.tensors.updater import make_updater

__all__ = ["PartSynchronizer"]


class PartSynchronizer(Synchronizer):
    """Averages at the end of a step, in the canonical order over the members.

    Args:
        exchange: between the members, called by all of them in the same order.
        ranks: of the members in the world.
        rank: this one's place among them.
    """

    scheme = "part"

    def __init__(self, exchange: Exchange, ranks: Sequence[int], rank: int, backend: str) -> None:
        self._exchange, self._ranks = exchange, ranks
        self.rank, self.nranks, self.backend = rank, len(ranks), backend

    def attach(self, arena: Arena, optimizer: Optimizer | None) -> None:
        layout = [[s.name, list(s.shape), s.dtype] for s in arena.layout.slots], [b.stop for b in arena.buckets]
        mine = np.array([zlib.crc32(json.dumps(layout).encode())], np.int64)
        for place, theirs in enumerate(self._exchange.all_gather(mine, "the model's layout")):
            if theirs[0] != mine[0]:
                raise LayoutMismatch(
                    f"rank {self._ranks[self.rank]} and rank {self._ranks[place]} disagree on the model's parameters; "
                    "give all members of a group the same model"
                )
        arena.parameters[:] = self._exchange.broadcast(arena.parameters, 0)
        self._arena, self._updater = arena, make_updater(optimizer, arena.parameters, arena.gradients)
        self._runner = BucketRunner(len(arena.buckets), self._average, overlap=False)
        self._step = 0

    def mark_ready(self, bucket: int) -> None:
        """Nothing travels before the step ends."""
        self._runner.mark_ready(bucket)

    def finish(self, learning_rate: float) -> None:
        self._runner.finish()
        self.guard.compare_notes(self.all_gather, self._step)
        self._updater.step(learning_rate)
        self._step += 1

    def _average(self, bucket: int) -> None:
        if self.guard.look(bucket, self._step):
            self.guard.spoil(bucket)
        where = self._arena.buckets[bucket]
        gradients = self._arena.gradients[where.start : where.stop].view(where.dtype)
        gradients[:] = self._exchange.all_reduce(gradients, "mean")

    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.stack(self._exchange.all_gather(np.ascontiguousarray(values).reshape(values.shape)))

    def another(self) -> PartSynchronizer:
        return PartSynchronizer(self._exchange, self._ranks, self.rank, self.backend)

    def close(self, reason: str = "") -> None:
        """The members' group stays."""
