"""`python -m benchmarks diff A B`: what got faster or slower beyond noise between two results of one kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.accuracy_figures import entries, straggler_words
from benchmarks.contestants import PADDLE_SCHEMES
from benchmarks.result_files import SCHEMA, kind_of, problem
from benchmarks.sweep_config import size_in_words
from common.errors import DataError, GradSyncError, UsageError

__all__ = ["Change", "DiffConfig", "Figure", "changes", "diff", "figures", "load"]

OURS = ("shm", "shm-copied", "tcp", "tcp-sgd", "ps-shm", "ps-grpc")  # backends of a sweep
COMPARED = ("compare", "script", "sweep", "crossover", "accuracy")
COLOURS = {"slower": "red", "faster": "green"}


@dataclass(frozen=True, kw_only=True)
class DiffConfig:
    """Say what got faster or slower beyond noise; exit code 1 if anything got slower.

    A difference counts if the spreads over repetitions do not overlap."""

    before: tyro.conf.Positional[Path]
    """results.json, script.json, sweep.json, crossover.json, accuracy.json, or a file of a history of them."""
    after: tyro.conf.Positional[Path]
    """Another one of the same kind."""


@dataclass(frozen=True)
class Figure:
    """The time of one thing, in ms (of `compare`: a thousand samples; of `accuracy`: to the target): median and spread
    over repetitions."""

    time: float
    low: float
    high: float
    ours: bool = True  # False: another library, or a limit of the machine


@dataclass(frozen=True)
class Change:
    """One thing that both results hold."""

    what: str
    before: Figure
    after: Figure

    @property
    def verdict(self) -> str:
        """ "faster", "slower", "within noise", or "noise unknown" (where one was measured once)."""
        if any(figure.low == figure.high for figure in (self.before, self.after)):
            return "noise unknown"
        if self.after.low > self.before.high:
            return "slower"
        return "faster" if self.after.high < self.before.low else "within noise"

    @property
    def factor(self) -> str:
        ratio = self.after.time / self.before.time
        return f"{ratio:.2f}x slower" if ratio > 1 else f"{1 / ratio:.2f}x faster"


def diff(config: DiffConfig) -> int:
    """Print the changes; returns 1 if anything got slower beyond noise, else 0.

    Raises:
        DataError: a file holds no results, or none that this version understands.
        UsageError: they are of different kinds, or of different trainings.
        GradSyncError: a file's certificate failed, or its sums were wrong, so it holds no speed.
    """
    console = Console(highlight=False)
    before, after = load(config.before), load(config.after)
    check_alike(before, after)
    found = changes(figures(before), figures(after))
    for line in remarks(before, after, found):
        console.print(Text(line, style="yellow"))
    counted = [change for change in found if change.before.ours]
    clear = [change for change in counted if change.verdict in COLOURS]
    if clear:
        console.print(table_of(sorted(clear, key=lambda change: change.before.time / change.after.time)))
    verdicts = [change.verdict for change in counted]
    kinds = ("slower", "faster", "within noise", "noise unknown")
    console.print(
        ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds if kind in verdicts) or "nothing in common"
    )
    return int("slower" in verdicts)


def load(path: Path) -> dict[str, Any]:
    """The results in a file, checked."""
    if path.is_dir():
        latest = [f", the latest is {name}" for name in sorted(file.name for file in path.glob("*Z-*.json"))[-1:]]
        raise DataError(f"{path} is a folder; give one of its files{''.join(latest)}")
    try:
        results = json.loads(path.read_text())
    except OSError as exc:
        raise DataError(f"cannot read {path}: {exc.strerror}") from exc
    except ValueError as exc:
        raise DataError(f"{path} is not JSON: {exc}") from exc
    if kind_of(results) not in COMPARED:
        raise DataError(f"{path} holds no results of {', '.join(COMPARED)}")
    if results["schema"] != SCHEMA:
        versions = f"has schema {results['schema']}, this version reads {SCHEMA}"
        raise DataError(f"{path} {versions}; use the version of GradSync that wrote it")
    if reason := problem(results):
        raise DataError(f"{path} breaks the schema of its kind: {reason}")
    if "certificate" in results and not results["runs"]:
        raise GradSyncError(f"{path}: the certificate failed, so there is no speed to compare")
    wrong = sorted({f"{row['backend']} N={row['nranks']}" for row in results.get("rows", ()) if row["wrong"]})
    if wrong:
        raise GradSyncError(f"{path}: wrong sums from {', '.join(wrong)}, so there is no speed to compare")
    return dict(results)


def figures(results: dict[str, Any]) -> dict[str, Figure]:
    """By what was measured."""
    return dict(_figures(results))


def _figures(results: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    for row in results.get("rows", ()):
        name = f"{row['backend']} N={row['nranks']} {size_in_words(row['bytes'])}"
        low, high = row["time_ms_interval"]
        yield name, Figure(row["time_ms"], low, high, ours=row["backend"] in OURS)
    if kind_of(results) == "accuracy":
        for entry in (each for group in entries(results) for each in group if each.reached == len(each.runs)):
            name = f"{entry.name}, {straggler_words(entry.straggler, results['job'])}"
            middle, low, high = (1e3 * each for each in entry.target)
            yield name, Figure(middle, low, high)
        return
    for run in results.get("runs", ()):
        if "samples_per_s" in run:
            low, high = run["samples_per_s_interval"]
            ours = run.get("scheme") not in PADDLE_SCHEMES
            yield run["contestant"], Figure(1e6 / run["samples_per_s"], 1e6 / high, 1e6 / low, ours=ours)
        else:
            low, high = run["step_ms_interval"]
            yield run["contestant"], Figure(run["step_ms"], low, high, ours=run["scheme"] not in PADDLE_SCHEMES)
    for cell in results.get("cells", ()):
        at = f"{cell['link']} {size_in_words(cell['bytes'])}"
        sides = (("ring", f"ring N={cell['nranks']} {at}"), ("ps", f"ps N={cell['nranks']} S={cell['servers']} {at}"))
        for scheme, name in sides:
            low, high = cell[scheme]["time_ms_interval"]
            yield name, Figure(cell[scheme]["time_ms"], low, high)
        low, high = cell["stream_bytes_per_s_interval"]
        a_mb = Figure(1e9 / cell["stream_bytes_per_s"], 1e9 / high, 1e9 / low, ours=False)
        yield f"plain stream N={cell['nranks']} {at}", a_mb


def changes(before: dict[str, Figure], after: dict[str, Figure]) -> list[Change]:
    return [Change(what, before[what], after[what]) for what in before if what in after]


def check_alike(before: dict[str, Any], after: dict[str, Any]) -> None:
    kinds = kind_of(before), kind_of(after)
    if kinds[0] != kinds[1]:
        raise UsageError(f"one is of {kinds[0]}, the other of {kinds[1]}; give two of a kind")
    jobs = [job_of(results) for results in (before, after)]
    if jobs[0] != jobs[1]:
        raise UsageError(f"they measured different things: {jobs[0]} / {jobs[1]}")


def job_of(results: dict[str, Any]) -> str:
    if kind_of(results) == "accuracy":
        return ", ".join(f"{key} {value}" for key, value in results["job"].items() if key != "seeds")
    keys = ("model", "dataset", "batch_size", "optimizer")
    trained = {", ".join(f"{key} {run[key]}" for key in keys if key in run) for run in results.get("runs", ())}
    where = (results.get("cluster") or {}).get("words", "")
    op = [results.get("op", "all_reduce")] * (kind_of(results) == "sweep")
    return "; ".join([*op, *sorted(trained), *([f"on {where}"] if where else [])])


def remarks(before: dict[str, Any], after: dict[str, Any], found: list[Change]) -> list[str]:
    """Why the figures may differ though the code does not, and what only one of the files holds."""
    machines = [[str(results["environment"].get(key)) for key in ("cpu", "cores")] for results in (before, after)]
    told = [f"different machines: {' / '.join(', '.join(m) + ' cores' for m in machines)}"] * (
        machines[0] != machines[1]
    )
    for change in found:
        if not change.before.ours and change.verdict in COLOURS:
            told.append(f"not ours: {change.what} is {change.factor}")
    names = [figures(results).keys() for results in (before, after)]
    told += [f"only before: {name}" for name in names[0] if name not in names[1]]
    return told + [f"only after: {name}" for name in names[1] if name not in names[0]]


def table_of(found: list[Change]) -> Table:
    table = Table("", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("before ms", "spread", "after ms", "spread", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    for change in found:
        cells = [text for figure in (change.before, change.after) for text in _cells(figure)]
        table.add_row(change.what, *cells, change.factor, style=COLOURS[change.verdict])
    return table


def _cells(figure: Figure) -> tuple[str, str]:
    return _digits(figure.time), f"{_digits(figure.low)}-{_digits(figure.high)}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
