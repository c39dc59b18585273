"""A training that is slowed on purpose and watched: who straggles at which step, and what the parameters were when."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.sync.synchronizer import Synchronizer
from common.tensors.arena import Arena, FloatArray
from common.tensors.optimizers import Optimizer

__all__ = ["STRAGGLERS", "Straggler", "Watch", "Watched"]

STRAGGLERS = ("none", "permanent", "random")


@dataclass(frozen=True)
class Straggler:
    """Who is slow at which step; the same for every contestant.

    Args:
        kind: "none"; "permanent": the last rank, always; "random": one rank, drawn anew for each step.
        factor: how many times as long as by itself what it computes takes; at least 1.
        seed: of the draws.
    """

    kind: str = "none"
    factor: float = 1.0
    seed: int = 1

    def slow_rank(self, step: int, nranks: int) -> int | None:
        """The rank that is slow at its step of this number; None: nobody."""
        if self.kind == "random":
            return int(np.random.default_rng([self.seed, step]).integers(nranks))
        return nranks - 1 if self.kind == "permanent" else None


@dataclass(frozen=True)
class Watch:
    """How a training is slowed and watched: rank 0's parameters of every `every` steps go to `file` (.npz)."""

    straggler: Straggler
    every: int
    file: Path

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "file": str(self.file)}

    @staticmethod
    def from_json(content: dict[str, Any]) -> Watch:
        return Watch(Straggler(**content["straggler"]), content["every"], Path(content["file"]))


class Watched(Synchronizer):
    """Another synchronizer, with a straggler, and with rank 0's parameters kept now and then in memory.

    A slow rank sleeps `factor` - 1 times as long as it has computed (input, forward, backward) before each bucket's
    gradients become final, so that they are `factor` times as late as they would have been.
    """

    def __init__(
        self,
        inner: Synchronizer,
        watch: Watch,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner, self._watch, self._clock, self._sleep = inner, watch, clock, sleep
        self.scheme, self.backend, self.rank, self.nranks = inner.scheme, inner.backend, inner.rank, inner.nranks
        self.servers, self.mode, self.staleness = inner.servers, inner.mode, inner.staleness
        self._step = 0
        self._steps: list[int] = []
        self._later: list[float] = []  # seconds from the end of that step to when its parameters were kept
        self._kept: list[FloatArray] = []
        self._computing_since = clock()

    def empty(self, count: int) -> FloatArray:
        return self._inner.empty(count)

    def attach(self, arena: Arena, optimizer: Optimizer | None) -> None:
        self._inner.attach(arena, optimizer)
        self.backend, self._arena = self._inner.backend, arena
        self._computing_since = self._clock()

    def announce(self, learning_rate: float) -> None:
        self._inner.announce(learning_rate)

    def mark_ready(self, bucket: int) -> None:
        if self._watch.straggler.slow_rank(self._step, self.nranks) == self.rank:
            computed = self._clock() - self._computing_since
            self._sleep((self._watch.straggler.factor - 1) * computed)
            self._computing_since = self._clock()
        self._inner.mark_ready(bucket)

    def launch_in(self, order: Sequence[int]) -> None:
        self._inner.launch_in(order)

    def finish(self, learning_rate: float) -> None:
        self._inner.finish(learning_rate)
        self._step += 1
        if self._step % self._watch.every == 0:
            self._keep(0.0)
        self._computing_since = self._clock()

    def settle(self) -> None:
        begun = self._clock()
        self._inner.settle()
        if not self._kept or not np.array_equal(self._kept[-1], self._arena.parameters):
            self._keep(self._clock() - begun)

    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        everyone = self._inner.all_gather(values)
        self._computing_since = self._clock()
        return everyone

    def another(self) -> Synchronizer:
        return self._inner.another()

    def close(self, reason: str = "") -> None:
        self._inner.close(reason)

    def save(self) -> None:
        """Rank 0 writes int64 `steps` [n], float64 `later` [n] (seconds) and float32 `parameters` [n, words]."""
        if self.rank == 0:
            np.savez(self._watch.file, steps=self._steps, later=np.array(self._later), parameters=np.stack(self._kept))

    def _keep(self, later: float) -> None:
        if self.rank == 0:
            self._steps.append(self._step)
            self._later.append(later)
            self._kept.append(self._arena.parameters.copy())
