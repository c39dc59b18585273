"""`python -m benchmarks accuracy`: how long each scheme and mode trains until it is good enough, straggler or not.

Rank 0 keeps its parameters every so many steps, which costs a copy of them; they are evaluated on the test split when
the training is over, so evaluation takes no time from it. The time to the target is when the first parameters that
reach it were kept. What is evaluated last is what all ranks agree on when they have settled. A round is a seed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import convert, structs, to_builtins
from rich.console import Console
from rich.text import Text

from benchmarks.contestants.table_of_trainings import Contestant
from benchmarks.flags.accuracy import AccuracyConfig
from benchmarks.measuring.measurement import Measurement, OnRun, there_and_back
from benchmarks.measuring.run import check_output, run
from benchmarks.netlab.hosts import OneHost
from benchmarks.records.accuracy import AccuracyResults, AccuracyRun, Certificate, Job
from benchmarks.records.environment import head
from benchmarks.reports.accuracy import verdict
from benchmarks.reports.accuracy.entries import straggler_words
from benchmarks.training.certificate import require_identical
from benchmarks.training.judge import WARMUP_STEPS, Judge
from benchmarks.training.pool import WorkerPool
from common.errors import CertificateFailed
from common.launch.job import FOLDER

__all__ = ["Race", "accuracy"]


def accuracy(config: AccuracyConfig) -> int:
    """Measure, print the verdict, and write `accuracy.json`, `accuracy.md` and `accuracy.html` to `config.out`.

    Raises:
        CertificateFailed: contestants that must compute the same bits did not; nothing is left in `config.out` then.
    """
    check_output(Race.file, config)
    return run(Race(config), config, Console(highlight=False))


class Race(Measurement[AccuracyResults]):
    """Every contestant to the target, under every straggler, with every seed."""

    file, report = "accuracy.json", "accuracy"

    def __init__(self, config: AccuracyConfig) -> None:
        self._config, self._seeds, self._contestants = config, config.every_seed(), config.contestants()
        self._trainings = [(straggler, c) for straggler in config.stragglers(1) for c in self._contestants]
        self._head, self._runs = head(), list[AccuracyRun]()
        self._digests: dict[str, str | None] = {}
        self._job = Job(
            model=config.model,
            dataset=config.dataset,
            batch_size=config.batch_size,
            optimizer=config.optimizer,
            lr=config.lr,
            nranks=config.nranks,
            steps=config.steps or 0,
            target=config.target,
            eval_every=config.eval_every,
            factor=config.stragglers(1)[-1].factor,
            seeds=self._seeds,
        )

    @property
    def rounds(self) -> int:
        return len(self._seeds)

    def cost(self) -> int:
        return 1 + len(self._seeds) * len(self._trainings)

    @contextmanager
    def prepared(self, on_run: OnRun) -> Iterator[None]:
        config = self._config
        most = max(self._contestants, key=lambda c: c.servers)
        with (
            tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-") as folder,
            WorkerPool(config.nranks, most.servers, OneHost()) as pool,
        ):
            on_run("warm-up")
            pool.run(most, replace(config, steps=WARMUP_STEPS, eval_every=1), warmup_steps=0)
            kept = Path(folder) / "kept.npz"
            self._judge = Judge(pool, config, every=config.eval_every, target=config.target, file=kept)
            yield

    def make_round(self, number: int, on_run: OnRun) -> None:
        seed, runs = self._seeds[number], dict[Contestant, list[AccuracyRun]]()
        for straggler, contestant in there_and_back(self._trainings, number):
            on_run(f"seed {seed}: {contestant.name}, {straggler_words(straggler.kind, self._job)}")
            runs.setdefault(contestant, []).append(self._judge.train(contestant, replace(straggler, seed=seed)))
        runs = {contestant: runs[contestant] for contestant in self._contestants}
        self._digests[str(seed)] = certified(runs, seed)
        self._runs += [run for mine in runs.values() for run in mine]

    def state(self) -> Any:
        return {"runs": to_builtins(self._runs), "digests": self._digests}

    def restore(self, kept: Any) -> None:
        self._runs += convert(kept["runs"], list[AccuracyRun])
        self._digests |= kept["digests"]

    def results(self, *, interrupted: bool = False) -> AccuracyResults:  # noqa: ARG002 - an interrupted one has none
        exact = [c.name for c in self._contestants if c.in_step]
        certificate = Certificate(passed=True, contestants=exact, sha256=self._digests)
        job = structs.replace(self._job, seeds=[seed for seed in self._seeds if str(seed) in self._digests])
        return AccuracyResults(**self._head, job=job, certificate=certificate, runs=self._runs)

    def show(self, results: AccuracyResults, console: Console) -> None:
        for sentence in verdict(results):
            console.print(Text(sentence))


def certified(runs: Mapping[Contestant, Sequence[AccuracyRun]], seed: int) -> str | None:
    """The digest of those that must have ended in the same bits, whoever straggled; None if there are none.

    Raises:
        CertificateFailed: they did not.
    """
    try:
        require_identical(runs)
    except CertificateFailed as exc:
        raise CertificateFailed(f"with seed {seed}: {exc}") from exc
    return next((mine[0].parameters_sha256 for c, mine in runs.items() if c.in_step), None)
