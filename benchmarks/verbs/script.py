"""`compare script.py`: a user's own program under each scheme, and under Paddle's own DataParallel."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from msgspec import convert, to_builtins
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.contestants.table_of_trainings import PADDLE_SCHEMES, Contestant
from benchmarks.flags.script import CompareScriptConfig
from benchmarks.measuring.measurement import Measurement, OnRun, there_and_back
from benchmarks.measuring.run import check_output, run
from benchmarks.records.environment import head
from benchmarks.records.script import Certificate, Failure, ProgramRecord, ScriptResults, ScriptRun
from benchmarks.reports.script import cells, heads, is_bad, notes, verdict, why_not_all
from benchmarks.stats.interval import interval
from benchmarks.training.program import ProgramFailed, check_program, output_of, run_once
from benchmarks.training.program_certificate import certify_programs, ours_that_disagree
from common.errors import CertificateFailed, GradSyncError
from common.launch.job import FOLDER
from common.system.sigterm import end_in_order_on_sigterm

__all__ = ["Programs", "compare_script"]

Failures = dict[Contestant, GradSyncError]


def compare_script(config: CompareScriptConfig, script: Sequence[str]) -> int:
    """Run every contestant `repetitions` times in turn; print a table; write `script.json`, and its .md and .html.

    A contestant that fails is named with its reason, and the others are measured without it.

    Raises:
        CertificateFailed: `ps` and `ring` ended with different parameters, or Paddle beyond the bound.
        GradSyncError: the program failed under a scheme of ours.
        UsageError: there is no such program, or it is not Python.
    """
    check_program(Path(script[0]))
    end_in_order_on_sigterm()
    check_output(Programs.file, config)
    console = Console(highlight=False)
    return run(Programs(config, script, console), config, console)


class Programs(Measurement[ScriptResults]):
    """A program under every scheme. Whoever has failed runs no more."""

    file, report = "script.json", "script"

    def __init__(self, config: CompareScriptConfig, script: Sequence[str], console: Console) -> None:
        self._config, self._script, self._console = config, script, console
        self._contestants = config.contestants()
        self._head = head()
        self._runs: dict[Contestant, list[ProgramRecord]] = {}
        self._failures: Failures = {}
        self._once_more = cache(self._run_beside)  # paddle and paddle-default are judged by the same one, every round

    @property
    def rounds(self) -> int:
        return self._config.repetitions

    def cost(self) -> int:
        return len(self._contestants) * self._config.repetitions

    @contextmanager
    def prepared(self, on_run: OnRun) -> Iterator[None]:  # noqa: ARG002
        with tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-") as folder:
            self._folder = Path(folder)
            yield

    def make_round(self, number: int, on_run: OnRun) -> None:
        for contestant in there_and_back(self._contestants, number):
            on_run(f"round {number + 1} of {self._config.repetitions}: {contestant.name}")
            if contestant in self._failures:
                continue
            try:
                self._runs.setdefault(contestant, []).append(self._run(contestant))
            except GradSyncError as exc:
                self._failures[contestant] = exc
                self._runs.pop(contestant, None)

    def _run(self, contestant: Contestant) -> ProgramRecord:
        limits = {"timeout": self._config.timeout, "run_timeout": self._config.run_timeout}
        return run_once(contestant, self._script, self._folder, warmup_steps=self._config.warmup_steps, **limits)

    def _run_beside(self, contestant: Contestant) -> bool:
        """Run one of ours that is not measured, for its parameters; False if it fails, which is noted."""
        why = "paddle-default has these matrix kernels" if contestant.mkl_chooses else "Paddle is beyond the bound"
        self._console.print(f"once more, as {contestant.name}: {why}", soft_wrap=True)
        try:
            self._run(contestant)
        except GradSyncError as exc:
            self._failures[contestant] = exc
            return False
        return True

    def state(self) -> Any:
        runs = {contestant.name: to_builtins(mine) for contestant, mine in self._runs.items()}
        return {"runs": runs, "failures": failures_to_json(self._failures)}

    def restore(self, kept: Any) -> None:
        for contestant in self._contestants:
            if contestant.name in kept["runs"]:
                self._runs[contestant] = convert(kept["runs"][contestant.name], list[ProgramRecord])
            if contestant.name in kept["failures"]:
                self._failures[contestant] = failure_from(kept["failures"][contestant.name])

    def results(self, *, interrupted: bool = False) -> ScriptResults:  # noqa: ARG002 - an interrupted one has none
        ran = [c for c in self._contestants if c in self._runs]
        certificate = certify_programs(ran, self._runs, self._failures, self._folder, self._once_more)
        speeds = [summarise(c, self._runs[c], self._config.warmup_steps) for c in ran] if certificate.passed else []
        return ScriptResults(
            **self._head,
            program=Path(self._script[0]).name,
            certificate=certificate,
            failed={c.name: Failure(str(exc), output_of(exc)) for c, exc in self._failures.items()},
            runs=speeds,
        )

    def show(self, results: ScriptResults, console: Console) -> None:
        show(results, console, told_later=blamed(results.certificate, self._failures))

    def judge(self, results: ScriptResults) -> None:
        judge(results.certificate, self._failures)


def judge(certificate: Certificate, failures: Failures) -> None:
    """Whatever says that ours are not right: a failed certificate first, then a failure. Paddle's own may fail."""
    for name, exc in ours_that_disagree(failures).items():
        raise CertificateFailed(f"{name}: {exc}; no speed is reported")
    if not certificate.identical:
        raise CertificateFailed("the schemes did not compute the same; no speed is reported")
    if not certificate.passed:
        raise CertificateFailed("too far from paddle.DataParallel; no speed is reported")
    if names := blamed(certificate, failures):
        exc = next(exc for contestant, exc in failures.items() if contestant.name == names[0])
        raise GradSyncError("\n  ".join([f"{', '.join(names)} failed: {exc}", *output_of(exc)]))


def blamed(certificate: Certificate, failures: Failures) -> list[str]:
    """Of those of ours that failed where the certificate passed, the names of the first and of all that did for the
    same reason, and then of Paddle's that did: `judge` tells it, so that nobody else need."""
    ours = {c.name: exc for c, exc in failures.items() if c.scheme not in PADDLE_SCHEMES}
    if not (certificate.identical and certificate.passed) or ours_that_disagree(failures):
        return []
    first = str(next(iter(ours.values()), ""))
    alike = [c.name for c, exc in failures.items() if str(exc) == first] if ours else []
    return sorted(alike, key=lambda name: name not in ours)


def failures_to_json(failures: Failures) -> dict[str, Any]:
    """By name, as they are kept between rounds."""
    return {
        c.name: {"reason": str(exc), "output": output_of(exc), "wrong": isinstance(exc, CertificateFailed)}
        for c, exc in failures.items()
    }


def failure_from(content: Mapping[str, Any]) -> GradSyncError:
    """What one entry of `failures_to_json` was made of."""
    reason, output = content["reason"], content["output"]
    return CertificateFailed(reason) if content["wrong"] else ProgramFailed(reason, output)


def summarise(contestant: Contestant, repetitions: Sequence[ProgramRecord], warmup: int) -> ScriptRun:
    """Median step time of each repetition, the median of those and its interval (ms); rank 0's memory above that after
    imports (MB)."""
    medians = [1e3 * float(np.median(np.diff(each.times)[warmup:])) for each in repetitions]
    low, high = interval(medians)
    return ScriptRun(
        contestant=contestant.name,
        scheme=contestant.scheme,
        nranks=contestant.nranks,
        steps=len(repetitions[0].times),
        repetitions=len(repetitions),
        step_ms=median(medians),
        step_ms_interval=(low, high),
        step_ms_rounds=medians,
        memory_mb=median(each.memory_bytes for each in repetitions) / 1e6,
        parameters_sha256=repetitions[0].parameters_sha256,
    )


def show(results: ScriptResults, console: Console, *, told_later: Sequence[str] = ()) -> None:
    """The table, and below it the report's verdict, but for the failures that are told after it."""
    if results.runs:
        console.print(table_of(results))
        for line in (*notes(results.runs), *why_not_all(results)):
            console.print(Text(line, style="dim"), soft_wrap=True)
        console.print()
    for line in verdict(results, without=told_later):
        console.print(Text(line, style="bold red" if is_bad(results) else "bold"), soft_wrap=True)


def table_of(results: ScriptResults) -> Table:
    """A row for each contestant; those that failed come last, without figures."""
    table = Table(*heads(results.runs), box=None, pad_edge=False)
    for each in results.runs:
        table.add_row(*cells(each, results.runs))
    for name in results.failed:
        table.add_row(name, "failed")
    return table
