"""What one training run reports: the run record of `--json` and of results.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

__all__ = ["Loss", "Quantiles", "RunRecord"]


@dataclass(frozen=True)
class Quantiles:
    """Median and 99th percentile over the measured steps, in milliseconds."""

    p50: float
    p99: float

    @staticmethod
    def of(seconds: Sequence[float] | np.ndarray[Any, Any]) -> Quantiles:
        values = np.asarray(seconds, float) * 1e3
        if not values.size:
            return Quantiles(0.0, 0.0)
        return Quantiles(float(np.percentile(values, 50)), float(np.percentile(values, 99)))


@dataclass(frozen=True)
class Loss:
    """Mean over ranks of the first and the last step's training loss."""

    first: float
    last: float


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One training run, as rank 0 saw it."""

    scheme: str  # "local", "ps", "ring"
    backend: str  # "none", "grpc", "shm", "tcp"
    nranks: int
    servers: int  # 0 where there are none
    mode: str = "sync"  # of parameter servers also "ssp:S", "async", "geo:K"
    model: str
    dataset: str
    batch_size: int  # samples a rank and step
    optimizer: str
    learning_rate: float
    seed: int
    steps: int  # all steps trained
    warmup_steps: int  # the first of them, left out of every timing
    samples_per_s: float  # over all ranks: nranks * batch_size / median step time; of each rank, if ranks run apart
    step_ms: Quantiles  # from one step's start to the next one's
    sync_ms: Quantiles  # exposed: blocked after the last rank's gradients were ready, update included
    wait_ms: Quantiles  # blocked before that: waiting for slower ranks
    phases_ms: dict[str, float]  # medians on rank 0: input, forward, backward, wait, sync
    loss: Loss
    accuracy: float | None  # share of the test split, 0..1; None if not evaluated
    parameters_sha256: str
    curve: list[tuple[float, float]] = field(default_factory=list)  # (seconds since the first step, loss)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
