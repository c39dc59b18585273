"""A measurement from its first round to its report."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console
from rich.text import Text

from benchmarks.measuring.measurement import Measurement
from benchmarks.measuring.rounds import rounds
from benchmarks.records.progress import progress
from benchmarks.records.result_files import AnyResults, check_history, plain, withdraw, write_results
from benchmarks.reports.writing import write_report
from common.errors import CertificateFailed
from common.launch.cli import check_writable
from common.system.process import Terminated

__all__ = ["Output", "check_output", "run"]

R = TypeVar("R", bound=AnyResults)
INTERRUPTED = 130  # by SIGINT, as a shell has it


class Output(Protocol):
    """The flags that say where results go."""

    @property
    def out(self) -> Path: ...

    @property
    def lang(self) -> str: ...

    @property
    def history(self) -> Path | None: ...


def check_output(file: str, output: Output) -> None:
    """Find out before measuring whether results can be written.

    Raises:
        UsageError: they cannot.
    """
    check_history(output.history)
    check_writable("out", output.out / file, make_folder=True)


def run(measurement: Measurement[R], output: Output, console: Console) -> int:
    """Measure, show, and write results and report; after Ctrl-C or SIGTERM of the whole rounds that there are, then not
    into the history. Returns the exit code.

    Raises:
        CertificateFailed: something computed the wrong thing; if no results can be made of it, nothing is left there.
        GradSyncError: a contestant of ours failed.
        KeyboardInterrupt, Terminated: there was no whole round yet.
    """
    if (output.out / measurement.file).exists():
        words = f"{output.out} has results of an earlier run, which this one replaces; --out FOLDER keeps both"
        console.print(Text(words, style="dim"), soft_wrap=True)
    reports = [f"{measurement.report}.{end}" for end in ("md", "html")]
    try:
        results, code = measure(measurement, output.out, console)
    except CertificateFailed:
        withdraw(output.out, measurement.file, *reports)
        raise
    measurement.show(results, console)  # first: the disk may be full
    write_results(results, output.out / measurement.file, None if code else output.history)
    write_report(results, output.out, measurement.report, output.lang)
    console.print(f"\nreport: {output.out / reports[-1]}", soft_wrap=True)
    measurement.judge(results)
    return code


def measure(measurement: Measurement[R], folder: Path, console: Console) -> tuple[R, int]:
    """(the results, the exit code: 0 unless it was interrupted)."""

    def so_far() -> object:
        found = measurement.results()
        return plain(found) if measurement.usable(found) else None

    try:
        with progress(console, measurement.cost()) as on_run, measurement.prepared(on_run):
            if measurement.rounds:
                left = rounds(
                    measurement.rounds, folder, state=measurement.state, restore=measurement.restore, so_far=so_far
                )
                for number in left:
                    measurement.make_round(number, on_run)
                measurement.finish(on_run)
            return measurement.results(), 0
    except (KeyboardInterrupt, Terminated) as exc:
        if not measurement.keep_whole_rounds():
            raise
        code = Terminated.EXIT_CODE if isinstance(exc, Terminated) else INTERRUPTED
        return measurement.results(interrupted=True), code
