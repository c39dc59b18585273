"""`python -m benchmarks accuracy`: how long each scheme and mode trains until it is good enough, straggler or not.

Rank 0 keeps its parameters every so many steps, which costs a copy of them; they are evaluated on the test split when
the training is over, so evaluation takes no time from it. The time to the target is when the first parameters that
reach it were kept. What is evaluated last is what all ranks agree on when they have settled.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from benchmarks.flags.accuracy import AccuracyConfig
from benchmarks.netlab.cluster import OneHost
from benchmarks.records.environment import plain_head
from benchmarks.records.progress import progress
from benchmarks.records.result_files import check_history, from_plain, withdraw, write_results
from benchmarks.reports.accuracy import verdict
from benchmarks.reports.accuracy.entries import straggler_words
from benchmarks.reports.writing import write_report
from benchmarks.training.certificate import require_identical, require_same_on_all_ranks
from benchmarks.training.contestants import Contestant
from benchmarks.training.pool import WorkerPool
from benchmarks.training.watched import Straggler, Watch
from common.errors import CertificateFailed
from common.launch.cli import check_writable
from common.launch.job import FOLDER
from ps.store.modes import parse_mode

__all__ = ["accuracy"]

WARMUP_STEPS = 3  # left out of samples/s; and the first training of all, which nobody measures


def accuracy(config: AccuracyConfig) -> None:
    """Measure, print the verdict, and write `accuracy.json`, `accuracy.md` and `accuracy.html` to `config.out`.

    Raises:
        CertificateFailed: contestants that must compute the same bits did not; nothing is left in `config.out` then.
    """
    check_writable("out", config.out / "accuracy.json")
    check_history(config.history)
    console = Console(highlight=False)
    try:
        results = run_all(config, console)
    except CertificateFailed:
        withdraw(config.out, "accuracy.json", "accuracy.md", "accuracy.html")
        raise
    for sentence in verdict(results):
        console.print(Text(sentence))
    write_results(from_plain(results), config.out / "accuracy.json", config.history)
    write_report(from_plain(results), config.out, "accuracy", config.lang)
    console.print(f"\nreport: {config.out / 'accuracy.html'}", soft_wrap=True)


def run_all(config: AccuracyConfig, console: Console) -> dict[str, Any]:
    """Everything that accuracy.json holds."""
    contestants, seeds = config.contestants(), config.every_seed()
    results: dict[str, Any] = {
        **plain_head("accuracy"),
        "job": {
            **{key: getattr(config, key) for key in ("model", "dataset", "batch_size", "optimizer", "lr")},
            **{key: getattr(config, key) for key in ("nranks", "steps", "target", "eval_every")},
            "factor": config.stragglers(1)[-1].factor,
            "seeds": seeds,
        },
        "certificate": {"passed": True, "contestants": [c.name for c in contestants if c.in_step], "sha256": {}},
        "runs": [],
    }
    trainings = [(straggler, c) for straggler in config.stragglers(1) for c in contestants]
    with (
        tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-") as folder,
        progress(console, 1 + len(seeds) * len(trainings)) as on_run,
        WorkerPool(config.nranks, max(c.servers for c in contestants), OneHost()) as pool,
    ):
        on_run("warm-up")
        pool.run(
            max(contestants, key=lambda c: c.servers), replace(config, steps=WARMUP_STEPS, eval_every=1), warmup_steps=0
        )
        judge = Judge(pool, config, Path(folder) / "kept.npz")
        for number, seed in enumerate(seeds):
            runs: dict[Contestant, list[dict[str, Any]]] = {c: [] for c in contestants}
            for straggler, contestant in trainings if number % 2 == 0 else reversed(trainings):
                on_run(f"seed {seed}: {contestant.name}, {straggler_words(straggler.kind, results['job'])}")
                runs[contestant].append(judge.train(contestant, replace(straggler, seed=seed)))
            results["certificate"]["sha256"][str(seed)] = certified(runs, seed)
            results["runs"] += [run for mine in runs.values() for run in mine]
    return results


def certified(runs: dict[Contestant, list[dict[str, Any]]], seed: int) -> str | None:
    """The digest of those that must have ended in the same bits, whoever straggled; None if there are none.

    Raises:
        CertificateFailed: they did not.
    """
    try:
        require_identical(runs)
    except CertificateFailed as exc:
        raise CertificateFailed(f"with seed {seed}: {exc}") from exc
    return next((mine[0]["parameters_sha256"] for c, mine in runs.items() if c.in_step), None)


class Judge:
    """Trains in the pool and evaluates what was kept; parameters that it has seen before are not evaluated again."""

    def __init__(self, pool: WorkerPool, config: AccuracyConfig, file: Path) -> None:
        self._pool, self._config, self._file = pool, config, file
        self._known: dict[str, float] = {}  # by digest of the parameters

    def train(self, contestant: Contestant, straggler: Straggler) -> dict[str, Any]:
        """One of the "runs" of accuracy.json.

        Raises:
            CertificateFailed: its ranks do not agree in the end.
        """
        steps = budget(contestant, straggler, self._config)
        config = replace(self._config, seed=straggler.seed, steps=steps)
        watch = Watch(straggler, config.eval_every, self._file)
        records = self._pool.run(contestant, config, warmup_steps=WARMUP_STEPS, evaluate=False, watch=watch)
        first = records[0]
        require_same_on_all_ranks(contestant, records, f"with seed {straggler.seed}: after {first['steps']} steps")
        points = self._points(config, first["curve"])
        reached = next((point for point in points if point["accuracy"] >= config.target), None)
        return {
            "contestant": contestant.name,
            **{key: first[key] for key in ("scheme", "backend", "mode", "nranks", "servers", "seed", "steps")},
            "straggler": straggler.kind,
            "samples_per_s": samples_per_s(records, config.batch_size),
            "seconds": points[-1]["seconds"],
            "target_s": reached["seconds"] if reached else None,
            "accuracy": points[-1]["accuracy"],
            "parameters_sha256": first["parameters_sha256"],
            "points": points,
        }

    def _points(self, config: AccuracyConfig, curve: list[tuple[float, float]]) -> list[dict[str, Any]]:
        """Every evaluation: `step`, `seconds` since the first step began, `loss` (mean over the steps since the last
        one), `accuracy`."""
        with np.load(self._file, allow_pickle=False) as stored:
            steps, later, kept = stored["steps"].tolist(), stored["later"].tolist(), stored["parameters"]
        digests = [hashlib.sha256(row.tobytes()).hexdigest() for row in kept]
        new = [row for row, digest in enumerate(digests) if digest not in self._known]
        for row, value in zip(new, self._pool.evaluate(config, self._file, new), strict=True):
            self._known[digests[row]] = value
        points: list[dict[str, Any]] = []
        before = 0
        for step, wait, digest in zip(steps, later, digests, strict=True):
            losses = [loss for _, loss in curve[before:step]] or [points[-1]["loss"]]
            seconds, before = curve[step - 1][0] + wait, step
            points.append({"step": step, "seconds": seconds, "loss": fmean(losses), "accuracy": self._known[digest]})
        return points


def budget(contestant: Contestant, straggler: Straggler, config: AccuracyConfig) -> int:
    """Steps of each rank. Where nobody waits for a permanent straggler, rank 0 goes on until all ranks together have
    made about as many steps as elsewhere: N/(N-1 + 1/F) times its own, up to the next evaluation."""
    steps, nranks, every = config.steps or 0, contestant.nranks, config.eval_every
    if straggler.kind != "permanent" or parse_mode(contestant.mode).staleness is not None:
        return steps
    more = steps * nranks / (nranks - 1 + 1 / straggler.factor)
    return math.ceil(round(more / every, 6)) * every


def samples_per_s(records: list[dict[str, Any]], batch_size: int) -> float:
    """Every rank's own rate from its first to its last step, warm-up left out, summed; waiting and straggling count."""
    rates: list[float] = []
    for record in records:
        curve, warmup = record["curve"], record["warmup_steps"]
        begun = curve[warmup - 1][0] if warmup else 0.0
        rates.append(batch_size * (len(curve) - warmup) / (curve[-1][0] - begun))
    return sum(rates)
