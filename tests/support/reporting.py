"""Reports of results that a test holds as plain ones, of which it names only the fields that matter."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from benchmarks.page.document import Plot, Report, plots_of
from benchmarks.reports import writing
from benchmarks.reports.compare.terminal import print_terminal
from tests.support.typed_results import typed

__all__ = ["plots", "report", "terminal", "to_html", "to_markdown", "verdict"]

Plain = dict[str, Any]


def verdict(results: Plain) -> list[str]:
    return writing.REPORTS[results["kind"]].verdict(typed(results))


def report(results: Plain) -> Report:
    return writing.REPORTS[results["kind"]].report(typed(results))


def plots(results: Plain) -> list[Plot]:
    return plots_of(report(results).sections)


def to_html(results: Plain) -> str:
    return writing.to_html(typed(results))


def to_markdown(results: Plain) -> str:
    return writing.to_markdown(typed(results))


def terminal(results: Plain, width: int) -> str:
    """Of a comparison."""
    console = Console(file=StringIO(), width=width)
    print_terminal(typed(results), console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]
