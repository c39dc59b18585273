"""`python -m benchmarks diff A B`: what got faster or slower beyond noise between two results of one kind, and how far
they agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.flags.sweep import size_in_words
from benchmarks.peers import OURS
from benchmarks.records.environment import machine_of
from benchmarks.records.result_files import SCHEMA, kind_of, problem
from benchmarks.reports.accuracy.entries import entries, straggler_words
from benchmarks.stats.agreement import Figure, agreement
from benchmarks.stats.interval import Measured, measured, three_digits
from benchmarks.training.contestants import PEERS
from common.errors import DataError, GradSyncError, UsageError

__all__ = ["Change", "DiffConfig", "changes", "diff", "figures", "load"]

COMPARED = ("compare", "script", "sweep", "crossover", "accuracy")
JOB = "suite"  # of parts, each one of those
COLOURS = {"slower": "red", "faster": "green"}


@dataclass(frozen=True, kw_only=True)
class DiffConfig:
    """Say what got faster or slower beyond noise, and how far two runs agree; exit code 1 if anything got slower.

    A difference counts if the intervals over repetitions do not overlap; who won within a run, its own rounds tell."""

    before: tyro.conf.Positional[Path]
    """results.json, script.json, sweep.json, crossover.json, accuracy.json, suite.json of a job, or a file of a
    history of them."""
    after: tyro.conf.Positional[Path]
    """Another one of the same kind."""


@dataclass(frozen=True)
class Change:
    """One thing that both results hold."""

    what: str
    before: Figure
    after: Figure

    @property
    def verdict(self) -> str:
        """ "faster", "slower", "within noise", or "noise unknown" (where one was measured once)."""
        if self.before.measured_once or self.after.measured_once:
            return "noise unknown"
        return {1: "slower", 0: "within noise", -1: "faster"}[self.after.against(self.before, same_rounds=False)]

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
    for line in agreement(figures(before), figures(after)).lines():
        console.print(Text(line), soft_wrap=True)
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
    if kind_of(results) not in (*COMPARED, JOB):
        raise DataError(f"{path} holds no results of {', '.join((*COMPARED, JOB))}")
    check(results, path)
    for part in parts_of(results).values():
        check(part, path)
    return dict(results)


def parts_of(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By name, the results of the parts of a job that were measured well."""
    parts = results["parts"] if kind_of(results) == JOB else ()
    return {part["name"]: part["results"] for part in parts if part["status"] == "done"}


def check(results: dict[str, Any], path: Path) -> None:
    """Whether they hold speed that this version understands."""
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


def figures(results: dict[str, Any]) -> dict[str, Figure]:
    """By what was measured; of a job with the part's name before it."""
    of_parts = {
        f"{part}: {name}": replace(figure, race=figure.race and f"{part}: {figure.race}")
        for part, found in parts_of(results).items()
        for name, figure in _figures(found)
    }
    return of_parts or dict(_figures(results))


def _figures(results: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    for row in results.get("rows", ()):
        race = f"N={row['nranks']} {size_in_words(row['bytes'])}"
        yield f"{row['backend']} {race}", figure(measured(row, "time_ms"), row["backend"] in OURS, race)
    if kind_of(results) == "accuracy":
        for entry in (each for group in entries(results) for each in group if each.reached == len(each.runs)):
            race = straggler_words(entry.straggler, results["job"])
            middle, low, high = (1e3 * each for each in entry.target)
            yield f"{entry.name}, {race}", Figure(middle, low, high, race=race)
        return
    for run in results.get("runs", ()):
        ours, race = run.get("scheme") not in PEERS, f"N={run['nranks']}"
        if "samples_per_s" in run:
            rate = measured(run, "samples_per_s")
            rounds = tuple(1e6 / each for each in rate.rounds)
            time = Measured(1e6 / rate.median, 1e6 / rate.high, 1e6 / rate.low, rounds)
        else:
            time = measured(run, "step_ms")
        yield run["contestant"], figure(time, ours, race)
    for cell in results.get("cells", ()):
        at = f"{cell['link']} {size_in_words(cell['bytes'])}"
        race = f"N={cell['nranks']} {at}"
        sides = (("ring", f"ring {race}"), ("ps", f"ps N={cell['nranks']} S={cell['servers']} {at}"))
        for scheme, name in sides:
            yield name, figure(measured(cell[scheme], "time_ms"), True, race)
        low, high = cell["stream_bytes_per_s_interval"]
        a_mb = Figure(1e9 / cell["stream_bytes_per_s"], 1e9 / high, 1e9 / low, ours=False)
        yield f"plain stream {race}", a_mb


def figure(time: Measured, ours: bool, race: str) -> Figure:
    return Figure(time.median, time.low, time.high, ours, race, time.rounds)


def changes(before: dict[str, Figure], after: dict[str, Figure]) -> list[Change]:
    return [Change(what, before[what], after[what]) for what in before if what in after]


def check_alike(before: dict[str, Any], after: dict[str, Any]) -> None:
    kinds = kind_of(before), kind_of(after)
    if kinds[0] != kinds[1]:
        raise UsageError(f"one is of {kinds[0]}, the other of {kinds[1]}; give two of a kind")
    mine, theirs = parts_of(before), parts_of(after)
    for name in mine.keys() & theirs.keys():
        check_alike(mine[name], theirs[name])
    jobs = [job_of(results) for results in (before, after)]
    if jobs[0] != jobs[1]:
        raise UsageError(f"they measured different things: {jobs[0]} / {jobs[1]}")
    for key in ("program", "servers"):  # which older files do not hold
        if key in before and key in after and before[key] != after[key]:
            raise UsageError(f"they measured different things: {key} {before[key]} / {key} {after[key]}")


def job_of(results: dict[str, Any]) -> str:
    if kind_of(results) == "accuracy":
        return ", ".join(f"{key} {value}" for key, value in results["job"].items() if key != "seeds")
    strong = results.get("scaling") == "strong"
    trained = {trained_by(run, ranks_share=strong) for run in results.get("runs", ())}
    where = (results.get("cluster") or {}).get("words", "")
    op = [results.get("op", "all_reduce")] * (kind_of(results) == "sweep")
    scaling = ["strong scaling"] * strong
    return "; ".join([*op, *sorted(trained), *scaling, *([f"on {where}"] if where else [])])


def trained_by(run: dict[str, Any], *, ranks_share: bool) -> str:
    """What a run trains; with one batch shared by all ranks, the whole of it, which is the same for all N."""
    keys = ("model", "dataset", "batch_size", "optimizer")
    told = {key: run[key] for key in keys if key in run}
    if ranks_share:
        told["batch_size"] *= run["nranks"]
    return ", ".join(f"{key} {value}" for key, value in told.items())


def remarks(before: dict[str, Any], after: dict[str, Any], found: list[Change]) -> list[str]:
    """Why the figures may differ though the code does not, and what only one of the files holds."""
    machines = [machine_of(results["environment"]) for results in (before, after)]
    told = [f"different machines or settings: {' / '.join(machines)}"] * (machines[0] != machines[1])
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
    return three_digits(figure.time), f"{three_digits(figure.low)}-{three_digits(figure.high)}"
