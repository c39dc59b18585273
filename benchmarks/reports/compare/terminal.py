"""The comparison on a terminal of 80 columns or more."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from benchmarks.records.compare import CompareResults
from benchmarks.reports.compare.certificate import certified, groups, holds, in_words
from benchmarks.reports.compare.report import cells, columns, notes, workload
from benchmarks.reports.compare.verdict import verdict
from benchmarks.reports.runs import winner

__all__ = ["print_terminal"]


def print_terminal(results: CompareResults, console: Console) -> None:
    """The whole report on a terminal of 80 columns or more."""
    console.print(f"Certificate: the parameters after {results.certificate.steps} steps", style="bold")
    console.print(_certificate_table(results))
    if groups(results):
        console.print(Text(f"Results: {workload(results)}", style="bold"))
        wide, narrow = (_results_table(results, gap=gap) for gap in (1, 0))
        fits = Measurement.get(console, console.options.update(width=1000), wide).maximum <= console.width
        console.print(wide if fits else narrow)
        if any(winner(runs) for _, runs in groups(results)):
            console.print(Text("* the fastest of its N", style="dim"))
    for line in notes(results):
        console.print(Text(line, style="dim"))
    console.print()
    for line in verdict(results):
        console.print(Text(line, style="bold" if holds(results) else "bold red"))


def _certificate_table(results: CompareResults) -> Table:
    table = Table("contestant", "bits", "sha256", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    colours: dict[bool | str | None, str] = {True: "green", False: "bold red"}
    for line in certified(results):
        outcome = Text(in_words(line.same), style=colours.get(line.same, "dim"))
        table.add_row(Text(line.contestant), outcome, line.digest[:12])
    return table


def _results_table(results: CompareResults, *, gap: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False)
    names = [cells(run)[0] for _, runs in groups(results) for run in runs]  # they break between words only
    for number, title in enumerate(columns()):
        numeric = number > 0
        least = None if numeric else max(len(word) for words in (title, *names) for word in words.split())
        table.add_column(title, justify="right" if numeric else "left", no_wrap=numeric, min_width=least)
    for _, runs in groups(results):
        first = winner(runs)
        for run in runs:
            name, *figures = cells(run)
            best = run is first
            table.add_row(Text(f"{name} *" if best else name), *figures, style="bold green" if best else "")
        table.add_section()
    return table
