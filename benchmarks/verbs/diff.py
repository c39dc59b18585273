"""`python -m benchmarks diff A B`: what got faster or slower beyond noise between two results of one kind, and how far
they agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.contestants.table_of_sweeps import OURS
from benchmarks.contestants.table_of_trainings import RIVALS
from benchmarks.records.accuracy import AccuracyResults
from benchmarks.records.compare import CompareResults, Run
from benchmarks.records.crossover import Cell, CrossoverResults
from benchmarks.records.environment import machine_of
from benchmarks.records.faults import FaultsResults
from benchmarks.records.programs import ProgramsResults
from benchmarks.records.result_files import read
from benchmarks.records.results import Cluster
from benchmarks.records.scale import ScaleResults
from benchmarks.records.script import ScriptResults
from benchmarks.records.suite import PartResults, SuiteResults
from benchmarks.records.sweep import SweepResults
from benchmarks.reports.accuracy.entries import entries, straggler_words
from benchmarks.stats.agreement import Figure, agreement
from benchmarks.stats.interval import Measured, three_digits
from benchmarks.stats.units import size_in_words
from common.errors import DataError, GradSyncError, UsageError

__all__ = ["Change", "DiffConfig", "changes", "diff", "figures", "load"]

TimedResults = PartResults | SuiteResults
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


def load(path: Path) -> TimedResults:
    """The results in a file, checked.

    Raises:
        DataError: it holds none.
        GradSyncError: it holds no speed.
        UsageError: nothing in it was timed.
    """
    if path.is_dir():
        latest = [f", the latest is {name}" for name in sorted(file.name for file in path.glob("*Z-*.json"))[-1:]]
        raise DataError(f"{path} is a folder; give one of its files{''.join(latest)}")
    results = read(path)
    if isinstance(results, (FaultsResults, ProgramsResults)):
        raise UsageError(f"{path} tells of promises kept, not of speed; give two results of something that was timed")
    if isinstance(results, ScaleResults):
        raise UsageError(f"{path} tells of sockets and threads, not of speed; give two results of something timed")
    for each in parts_of(results).values():
        check(each, path)
    return results


def parts_of(results: TimedResults) -> dict[str, PartResults]:
    """By name, the results of the parts of a job that were measured well; of one part, that one."""
    return results.done() if isinstance(results, SuiteResults) else {"": results}


def check(results: PartResults, path: Path) -> None:
    """Whether they hold speed."""
    if isinstance(results, SweepResults):
        wrong = sorted({f"{row.backend} N={row.nranks}" for row in results.rows if row.wrong})
        if wrong:
            raise GradSyncError(f"{path}: wrong sums from {', '.join(wrong)}, so there is no speed to compare")
    elif not isinstance(results, CrossoverResults) and not results.runs:
        raise GradSyncError(f"{path}: the certificate failed, so there is no speed to compare")


def figures(results: TimedResults) -> dict[str, Figure]:
    """By what was measured; of a job with the part's name before it."""
    return {
        part + name: replace(figure, race=figure.race and part + figure.race)
        for part, found in ((f"{name}: " if name else "", found) for name, found in parts_of(results).items())
        for name, figure in _figures(found)
    }


def _figures(results: PartResults) -> Iterator[tuple[str, Figure]]:
    match results:
        case SweepResults():
            for row in results.rows:
                race = f"N={row.nranks} {size_in_words(row.bytes)}"
                yield f"{row.backend} {race}", figure(row.time, row.backend in OURS, race)
        case AccuracyResults():
            yield from _figures_of_accuracy(results)
        case CrossoverResults():
            for cell in results.cells:
                yield from _figures_of_cell(cell)
        case CompareResults():
            for run in results.runs:
                yield run.contestant, figure(time_of(run.rate), run.scheme not in RIVALS, f"N={run.nranks}")
        case ScriptResults():
            for program in results.runs:
                ours = program.scheme not in RIVALS
                yield program.contestant, figure(program.step, ours, f"N={program.nranks}")


def _figures_of_accuracy(results: AccuracyResults) -> Iterator[tuple[str, Figure]]:
    for entry in (each for group in entries(results) for each in group if each.reached == len(each.runs)):
        race = straggler_words(entry.straggler, results.job)
        middle, low, high = (1e3 * each for each in entry.target)
        yield f"{entry.name}, {race}", Figure(middle, low, high, race=race)


def _figures_of_cell(cell: Cell) -> Iterator[tuple[str, Figure]]:
    at = f"{cell.link} {size_in_words(cell.bytes)}"
    race = f"N={cell.nranks} {at}"
    yield f"ring {race}", figure(cell.ring.time, True, race)
    yield f"ps N={cell.nranks} S={cell.servers}{'+' * cell.apart} {at}", figure(cell.ps.time, True, race)
    low, high = cell.stream_bytes_per_s_interval
    yield f"plain stream {race}", Figure(1e9 / cell.stream_bytes_per_s, 1e9 / high, 1e9 / low, ours=False)


def time_of(rate: Measured) -> Measured:
    """Of a thousand samples, in ms."""
    return Measured(1e6 / rate.median, 1e6 / rate.high, 1e6 / rate.low, tuple(1e6 / each for each in rate.rounds))


def figure(time: Measured, ours: bool, race: str) -> Figure:
    return Figure(time.median, time.low, time.high, ours, race, time.rounds)


def changes(before: dict[str, Figure], after: dict[str, Figure]) -> list[Change]:
    return [Change(what, before[what], after[what]) for what in before if what in after]


def check_alike(before: TimedResults, after: TimedResults) -> None:
    """
    Raises:
        UsageError: they are of different kinds, or of different trainings.
    """
    if before.kind != after.kind:
        raise UsageError(f"one is of {before.kind}, the other of {after.kind}; give two of a kind")
    mine, theirs = parts_of(before), parts_of(after)
    for name in mine.keys() & theirs.keys():
        if mine[name].kind != theirs[name].kind:
            raise UsageError(f"one {name} is of {mine[name].kind}, the other of {theirs[name].kind}")
        jobs = [job_of(results[name]) for results in (mine, theirs)]
        if jobs[0] != jobs[1]:
            raise UsageError(f"they measured different things: {jobs[0]} / {jobs[1]}")


def job_of(results: PartResults) -> str:
    """What was measured, in words."""
    match results:
        case AccuracyResults(job=job):
            return ", ".join(f"{key} {value}" for key, value in asdict(job).items() if key != "seeds")
        case SweepResults():
            servers = [f"servers {results.servers}"] * bool(results.servers)
            return "; ".join([results.op, *servers, *on(results.cluster)])
        case CompareResults():
            strong = results.scaling == "strong"
            trained = {trained_by(run, ranks_share=strong) for run in results.runs}
            return "; ".join([*sorted(trained), *["strong scaling"] * strong, *on(results.cluster)])
        case ScriptResults():
            return f"program {results.program}" if results.program else ""
        case CrossoverResults():
            return ""


def on(cluster: Cluster | None) -> list[str]:
    return [f"on {cluster.words}"] if cluster else []


def trained_by(run: Run, *, ranks_share: bool) -> str:
    """What a run trains; with one batch shared by all ranks, the whole of it, which is the same for all N."""
    batch = run.batch_size * (run.nranks if ranks_share else 1)
    return f"model {run.model}, dataset {run.dataset}, batch_size {batch}, optimizer {run.optimizer}"


def remarks(before: TimedResults, after: TimedResults, found: list[Change]) -> list[str]:
    """Why the figures may differ though the code does not, and what only one of the files holds."""
    machines = [machine_of(results.environment) for results in (before, after)]
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
