"""What stands against a parameter server's round: our all-reduce over TCP, then the step of SGD on every rank."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from benchmarks.contestants import gradsync
from benchmarks.contestants.table_of_sweeps import RATE
from common.system.memory import aligned_empty
from common.tensors.optimizers import SGD

__all__ = ["Rank", "why_absent"]

why_absent = gradsync.why_absent


class Rank(gradsync.Rank):
    parameters: npt.NDArray[Any]

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:
        super().__init__(name, rank, nranks, address)
        from common.tensors.flat_optimizer import FlatOptimizer

        self._optimizer_of = FlatOptimizer

    def resize(self, count: int) -> None:
        super().resize(count)
        self.parameters = aligned_empty(count)
        self.parameters.fill(0)
        self._optimizer = self._optimizer_of(SGD(learning_rate=RATE), self.parameters, self.array)

    def push_pull(self) -> None:
        self._group.all_reduce(self.array, "mean")
        self._optimizer.step(RATE)
