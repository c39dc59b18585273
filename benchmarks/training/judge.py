"""A training that is watched: when it reached the target, and how good it was in the end."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.contestants.table_of_trainings import Contestant
from benchmarks.records.accuracy import AccuracyRun, Point
from benchmarks.records.compare import RankRecord
from benchmarks.training.certificate import require_same_on_all_ranks
from benchmarks.training.pool import WorkerPool
from benchmarks.training.watched import Straggler, Watch
from common.launch.flags import TrainingConfig
from ps.store.modes import parse_mode

__all__ = ["WARMUP_STEPS", "Judge", "budget", "samples_per_s"]

WARMUP_STEPS = 3  # left out of samples/s; and the first training of all, which nobody measures


class Judge:
    """Trains in the pool and evaluates what was kept; parameters that it has seen before are not evaluated again."""

    def __init__(self, pool: WorkerPool, config: TrainingConfig, *, every: int, target: float, file: Path) -> None:
        self._pool, self._config, self._file = pool, config, file
        self._every, self._target = every, target
        self._known: dict[str, float] = {}  # by digest of the parameters

    def train(self, contestant: Contestant, straggler: Straggler) -> AccuracyRun:
        """
        Raises:
            CertificateFailed: its ranks do not agree in the end.
        """
        steps = budget(contestant, straggler, self._config.steps or 0, self._every)
        config = replace(self._config, seed=straggler.seed, steps=steps)
        watch = Watch(straggler, self._every, self._file)
        records = self._pool.run(contestant, config, warmup_steps=WARMUP_STEPS, evaluate=False, watch=watch)
        first = records[0]
        require_same_on_all_ranks(contestant, records, f"with seed {straggler.seed}: after {first.steps} steps")
        points = self._points(config, first.curve)
        reached = next((point for point in points if point.accuracy >= self._target), None)
        return AccuracyRun(
            contestant=contestant.name,
            scheme=first.scheme,
            backend=first.backend,
            mode=first.mode,
            nranks=first.nranks,
            servers=first.servers,
            seed=first.seed,
            steps=first.steps,
            straggler=straggler.kind,
            samples_per_s=samples_per_s(records, config.batch_size),
            seconds=points[-1].seconds,
            target_s=reached.seconds if reached else None,
            accuracy=points[-1].accuracy,
            parameters_sha256=first.parameters_sha256,
            points=points,
        )

    def _points(self, config: TrainingConfig, curve: Sequence[tuple[float, float]]) -> list[Point]:
        """Every evaluation."""
        with np.load(self._file, allow_pickle=False) as stored:
            steps, later, kept = stored["steps"].tolist(), stored["later"].tolist(), stored["parameters"]
        digests = [hashlib.sha256(row.tobytes()).hexdigest() for row in kept]
        new = [row for row, digest in enumerate(digests) if digest not in self._known]
        for row, value in zip(new, self._pool.evaluate(config, self._file, new), strict=True):
            self._known[digests[row]] = value
        points: list[Point] = []
        before = 0
        for step, wait, digest in zip(steps, later, digests, strict=True):
            losses = [loss for _, loss in curve[before:step]] or [points[-1].loss]
            seconds, before = curve[step - 1][0] + wait, step
            points.append(Point(step, seconds, fmean(losses), self._known[digest]))
        return points


def budget(contestant: Contestant, straggler: Straggler, steps: int, every: int) -> int:
    """Steps of each rank. Where nobody waits for a permanent straggler, rank 0 goes on until all ranks together have
    made about as many steps as elsewhere: N/(N-1 + 1/F) times its own, up to the next evaluation."""
    nranks = contestant.nranks
    if straggler.kind != "permanent" or parse_mode(contestant.mode).staleness is not None:
        return steps
    more = steps * nranks / (nranks - 1 + 1 / straggler.factor)
    return math.ceil(round(more / every, 6)) * every


def samples_per_s(records: Sequence[RankRecord], batch_size: int) -> float:
    """Every rank's own rate from its first to its last step, warm-up left out, summed; waiting and straggling count."""
    rates: list[float] = []
    for record in records:
        curve, warmup = record.curve, record.warmup_steps
        begun = curve[warmup - 1][0] if warmup else 0.0
        rates.append(batch_size * (len(curve) - warmup) / (curve[-1][0] - begun))
    return sum(rates)
