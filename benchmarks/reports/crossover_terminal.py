"""The crossover map on a terminal of 80 columns or more."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.records.crossover import CrossoverResults
from benchmarks.reports.crossover import cells_of, heads, in_cell, name_of, panels, verdict

__all__ = ["print_terminal"]


def print_terminal(results: CrossoverResults, console: Console) -> None:
    """The tables, for 80 columns or more, and the verdict."""
    for cells in panels(results):
        shown = Table(title=name_of(cells[0]), title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for number, head in enumerate(heads()):
            words = head.replace(" (", "\n").replace("of bound", "of\nbound").strip(")")
            shown.add_column(words, justify="left" if number < 2 else "right", overflow="fold")
        for cell in cells:
            shown.add_row(*cells_of(cell)[:-1], in_cell(cell))
        console.print(shown)
        console.print()
    console.print(Text("≈ within noise", style="dim"))
    for line in verdict(results):
        console.print(Text(line, style="bold"))
