"""What both simulations share: their training, which NumPy alone computes once more, and the story of a seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.tensors.arena import FloatArray
from common.tensors.buckets import Bucket, chunk_bounds
from common.tensors.canonical_order import canonical_ranks

__all__ = ["RATE", "PromiseBroken", "Story", "Training"]

RATE = np.float32(0.125)


class PromiseBroken(AssertionError):
    """What a simulation has found; the seed shows it again."""


class Story:
    """All that happens in a seed, in order.

    Args:
        log: is told of it, too.
    """

    def __init__(self, seed: int, log: Callable[[str], object]) -> None:
        self.rng = random.Random(seed)
        self._log, self._lines = log, hashlib.sha256()

    def tell(self, now: float, line: str) -> None:
        self._lines.update(f"{line}\n".encode())
        self._log(f"{now:8.3f} {line}")

    @property
    def history(self) -> str:
        """SHA-256."""
        return self._lines.hexdigest()


@dataclass(frozen=True)
class Training:
    """What is trained, by gradient descent."""

    nranks: int
    buckets: list[Bucket]
    length: int
    steps: int
    seed: int

    def gradients(self, rank: int, step: int, parameters: FloatArray) -> FloatArray:
        """Of mixed magnitudes, so that another order of summation gives other bits; they depend on parameters, so that
        a wrong one is never forgotten."""
        return self.noise(rank, step) + parameters

    def noise(self, rank: int, step: int) -> FloatArray:
        draw = np.random.default_rng([self.seed, rank, step])
        return (draw.standard_normal(self.length) * 10.0 ** draw.integers(-3, 4, self.length)).astype(np.float32)

    def initial(self) -> FloatArray:
        return np.random.default_rng([self.seed, 99]).standard_normal(self.length).astype(np.float32)

    def mean(self, each: list[FloatArray]) -> FloatArray:
        """In the canonical order."""
        found = np.empty(self.length, np.float32)
        for bucket in self.buckets:
            for chunk, (a, b) in enumerate(chunk_bounds(bucket.length, self.nranks)):
                run = slice(bucket.start + a, bucket.start + b)
                first, *others = canonical_ranks(chunk, self.nranks)
                total = each[first][run]
                for rank in others:
                    total = total + each[rank][run]
                found[run] = total * np.float32(1 / self.nranks)
        return found

    def undisturbed(self) -> FloatArray:
        """The parameters of a run to which nothing happens."""
        parameters = self.initial()
        for step in range(self.steps):
            each = [self.gradients(rank, step, parameters) for rank in range(self.nranks)]
            parameters = parameters - RATE * self.mean(each)
        return parameters
