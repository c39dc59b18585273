"""The kinds of result files, and the module that reports each."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from benchmarks.plot import Plot
from benchmarks.result_files import kind_of
from common.errors import choose

__all__ = ["REPORTS", "RESULT_FILES", "Report", "report_of"]

REPORTS = {
    "compare": "benchmarks.html_report",
    "script": "benchmarks.script_report",
    "sweep": "benchmarks.sweep_report",
    "accuracy": "benchmarks.accuracy_report",
    "crossover": "benchmarks.crossover_report",
}
RESULT_FILES = ("results.json", "script.json", "sweep.json", "accuracy.json", "crossover.json")


class Report(Protocol):
    """A module that reports results of one kind; where a certificate failed, without any speed."""

    def verdict(self, results: dict[str, Any]) -> list[str]:
        """The outcome in plain sentences."""

    def plots(self, results: dict[str, Any]) -> list[Plot]:
        """Their names begin with the kind, and are unique among one file's plots."""

    def sections(self, results: dict[str, Any]) -> list[str]:
        """Sections of a page, as `html_page.section` makes them; among them a `plot_section` for every plot."""

    def to_markdown(self, results: dict[str, Any]) -> str:
        """The whole report of this file."""


def report_of(results: dict[str, Any]) -> Report:
    """Imported when it is needed.

    Raises:
        UsageError: results of another kind.
    """
    kind = choose("kind of results", kind_of(results), REPORTS)
    return cast(Report, importlib.import_module(REPORTS[kind]))
