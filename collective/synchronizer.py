"""The collective scheme: every rank keeps a full copy, and the ranks average their gradients in a ring."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from collective.group import Group
from common.arena import Arena, FloatArray
from common.errors import LayoutMismatch
from common.optimizers import Optimizer
from common.overlap import BucketRunner
from common.synchronizer import Synchronizer
from common.updater import make_updater

__all__ = ["RingSynchronizer"]


class RingSynchronizer(Synchronizer):
    """All-reduces each bucket as it becomes final, then updates the whole arena with the rank's own optimizer."""

    scheme = "ring"

    def __init__(self, group: Group, *, overlap: bool = True) -> None:
        self._group = group
        self._overlap = overlap
        self._runner: BucketRunner | None = None
        self.backend, self.rank, self.nranks = group.backend, group.rank, group.nranks

    def empty(self, count: int) -> FloatArray:
        return self._group.empty(count)

    def attach(self, arena: Arena, optimizer: Optimizer | None) -> None:
        self._agree(arena, optimizer)
        self._group.broadcast(arena.parameters)
        self._arena = arena
        self._updater = make_updater(optimizer, arena.parameters, arena.gradients)
        self._step = 0
        self._runner = BucketRunner(len(arena.buckets), self._reduce, overlap=self._overlap)

    def mark_final(self, bucket: int) -> None:
        self._attached().mark_final(bucket)

    def launch_in(self, order: Sequence[int]) -> None:
        self._attached().order.follow(order)

    def finish(self, learning_rate: float) -> None:
        self._attached().finish()
        self._updater.step(learning_rate)
        self._step += 1

    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._group.all_gather(values)

    def close(self, reason: str = "") -> None:
        self._group.close(reason)
        if self._runner:
            self._runner.close()

    def _attached(self) -> BucketRunner:
        if self._runner is None:
            raise RuntimeError("attach an arena first")
        return self._runner

    def _reduce(self, bucket: int) -> None:
        where = self._arena.buckets[bucket]
        gradients = self._arena.gradients[where.start : where.stop].view(where.dtype)
        self._group.all_reduce(gradients, "mean", step=self._step, bucket=bucket)

    def _agree(self, arena: Arena, optimizer: Optimizer | None) -> None:
        """Compare what all ranks are about to do."""
        mine: dict[str, list[Any]] = {
            "layout": [[s.name, list(s.shape), s.dtype] for s in arena.layout.slots],
            "buckets": [[b.start, b.stop] for b in arena.buckets],
            "optimizer": [optimizer.name, asdict(optimizer)] if optimizer else [],
        }
        text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
        lengths = self._group.all_gather(np.array([text.size], np.int64))[:, 0]
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: text.size] = text
        everyone = self._group.all_gather(padded)
        for rank, (row, length) in enumerate(zip(everyone, lengths, strict=True)):
            theirs = json.loads(row[:length].tobytes())
            for what in mine:
                if theirs[what] != mine[what]:
                    raise LayoutMismatch(
                        f"rank {self.rank} and rank {rank} disagree on the {what}: "
                        f"{_first_difference(mine[what], theirs[what])}; give all ranks the same model and flags"
                    )


def _first_difference(mine: list[Any], theirs: list[Any]) -> str:
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            return f"{a} against {b}"
    return f"{len(mine)} against {len(theirs)} entries"
