"""`python -m benchmarks sweep`: one operation over sizes and ranks, all backends in turn, in nccl-tests' manner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.contestants.table_of_sweeps import load_backend
from benchmarks.flags.sweep import SweepConfig
from benchmarks.measuring.measurement import Measurement, OnRun, there_and_back
from benchmarks.measuring.run import check_output, run
from benchmarks.operations.groups import Groups, groups_of, leave, leaving, restless_among
from benchmarks.operations.link import link_bytes
from benchmarks.operations.measured import Measured
from benchmarks.operations.rows import rows_of
from benchmarks.records.environment import head
from benchmarks.records.sweep import SweepResults, Waiting
from benchmarks.reports.sweep import TITLES, WAITING, cells, verdict, wrong_backends
from benchmarks.stats.units import size_in_words
from common.errors import CertificateFailed, GradSyncError

__all__ = ["Sweep", "make_round", "measure_waiting", "run_sweep"]

LATE_BYTES = 4096  # of the call to which the last rank comes late


def run_sweep(config: SweepConfig) -> int:
    """Measure, print a table for each number of ranks, and write `sweep.json`, `sweep.md` and `sweep.html`.

    Raises:
        CertificateFailed: a backend gave wrong sums.
        GradSyncError: one of ours failed; another library's is named in the results, and the rest go on.
    """
    check_output(Sweep.file, config)
    console = Console(highlight=False)
    return run(Sweep(config, console), config, console)


class Sweep(Measurement[SweepResults]):
    """One operation with every backend that is there."""

    file, report = "sweep.json", "sweep"

    def __init__(self, config: SweepConfig, console: Console) -> None:
        self._config, self._console, self._head = config, console, head()
        reasons = {name: load_backend(name).why_absent(name) for name in config.names()}
        self._absent = {name: reason for name, reason in reasons.items() if reason}
        for name, reason in self._absent.items():
            console.print(f"absent: {name}: {reason}", soft_wrap=True, markup=False)
        self._present = [name for name in reasons if name not in self._absent]
        self._measured = {nranks: Measured() for nranks in sorted({int(n) for n in config.nranks.split(",")})}
        self._groups: list[Groups] = []

    @property
    def rounds(self) -> int:
        return self._config.repetitions

    def cost(self) -> int:
        restless = restless_among(self._present, self._config.op)
        each_round = len(self._config.bytes) * (len(self._present) > len(restless)) + len(restless)
        return len(self._measured) * (self._config.repetitions * each_round + waits(self._config))

    @contextmanager
    def prepared(self, on_run: OnRun) -> Iterator[None]:  # noqa: ARG002
        config = self._config
        with config.cluster.make() as hosts, ExitStack() as running:
            for nranks, mine in self._measured.items():
                groups = groups_of(nranks, self._present, config.op, config.servers, hosts, config.cluster, mine)
                self._groups.append(running.enter_context(groups))
            try:
                yield
            except GradSyncError:
                self.show(self.results(), self._console)  # what there is
                raise

    def make_round(self, number: int, on_run: OnRun) -> None:
        for groups in self._groups:
            make_round(groups, self._measured[groups.nranks], self._config, number, on_run)

    def finish(self, on_run: OnRun) -> None:
        for groups in self._groups if waits(self._config) else ():
            on_run(f"N={groups.nranks}, waiting for a rank that is late")
            measure_waiting(groups, self._measured[groups.nranks], self._config.late)

    def state(self) -> Any:
        return [mine.to_json() for mine in self._measured.values()]

    def restore(self, kept: Any) -> None:
        for mine, each in zip(self._measured.values(), kept, strict=True):
            mine.restore(each)

    def keep_whole_rounds(self) -> bool:
        return bool(self.results().rows)

    def results(self, *, interrupted: bool = False) -> SweepResults:
        found, config = self._measured, self._config
        return SweepResults(
            **self._head,
            op=config.op,
            cluster=config.cluster.describe(),
            servers=config.servers if config.op == "push_pull" else 0,
            interrupted=interrupted,
            absent=self._absent,
            failed={f"{name} N={n}": reason for n, mine in found.items() for name, reason in mine.failed.items()},
            rows=[row for n, mine in found.items() for row in rows_of(mine, self._present, n, config)],
            waiting=[row for mine in found.values() for row in mine.waiting],
        )

    def usable(self, results: SweepResults) -> bool:
        return not any(row.wrong for row in results.rows)

    def show(self, results: SweepResults, console: Console) -> None:
        show(results, console)

    def judge(self, results: SweepResults) -> None:
        if wrong := wrong_backends(results):
            raise CertificateFailed(f"wrong sums from {', '.join(wrong)}; no speed is reported")


def make_round(groups: Groups, measured: Measured, config: SweepConfig, number: int, on_run: OnRun) -> None:
    """Of one number of ranks. Another library's group that fails leaves."""
    where, largest = f"N={groups.nranks}, round {number + 1} of {config.repetitions}", max(config.bytes)
    leave(groups, measured)  # also those that failed before a job was resumed
    for nbytes in config.bytes if groups.started else ():
        on_run(f"{where}, {size_in_words(nbytes)}")
        for group in there_and_back(groups.started, number):
            with leaving(group.backend, measured):
                measured.add(group, nbytes, config.seconds, with_memory=nbytes == largest)
                group.rest()
        leave(groups, measured)
    for name, start in there_and_back([*groups.restless.items()], number):
        if name not in measured.failed:
            on_run(f"{where}, {name} alone")
            with leaving(name, measured), start() as group:
                for nbytes in config.bytes:
                    measured.add(group, nbytes, config.seconds, with_memory=nbytes == largest)
    if groups.link is not None:
        measured.add(groups.link, link_bytes(config.cluster), config.seconds)


def measure_waiting(groups: Groups, measured: Measured, late: float) -> None:
    """What a core does while its rank waits for the last one."""
    summing = [each for each in groups.started if each.nranks > 1 and getattr(load_backend(each.backend), "sums", True)]
    for group in summing:
        with leaving(group.backend, measured):
            core = group.wait(LATE_BYTES, late)
            measured.waiting.append(Waiting(group.backend, group.nranks, late, core))


def waits(config: SweepConfig) -> bool:
    """Whether it is measured what waiting costs: where the ranks wait for each other, not for a server."""
    return config.op == "all_reduce" and config.late > 0


def show(results: SweepResults, console: Console) -> None:
    """A table for each number of ranks, but none if anything was wrong, at whatever number; then the verdict."""
    bad = bool(wrong_backends(results))
    for nranks in sorted({row.nranks for row in results.rows}) if not bad else ():
        show_table(results, nranks, console)
    console.print()
    for sentence in verdict(results) if results.rows or results.failed else ():
        console.print(Text(sentence, style="bold red" if bad else "bold"), soft_wrap=True)


def show_table(results: SweepResults, nranks: int, console: Console) -> None:
    where = f" on {results.cluster.words}" if results.cluster else ""
    table = Table(
        "bytes",
        "backend",
        title=f"{TITLES[results.op]}, N={nranks}{where}; bandwidths in GB/s",
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 1),
    )
    for column in ("time ms", "interval", "algbw", "busbw", "of limit"):  # wrong is none, or nothing is shown
        table.add_column(column, justify="right", no_wrap=True)
    last = None
    for row in (each for each in results.rows if each.nranks == nranks):
        size = size_in_words(row.bytes)
        table.add_row("" if size == last else size, *cells(row)[:-1])
        last = size
    console.print()
    console.print(table)
    mine = [row for row in results.waiting if row.nranks == nranks]
    if mine:
        told = ", ".join(f"{row.backend} {row.core:.1%}" for row in mine)
        console.print(f"\n{WAITING.format(late=mine[0].late_s)}: {told}", soft_wrap=True)
