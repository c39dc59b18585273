"""The kinds of result files, and the module that reports each."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from benchmarks.diff import kind_of
from benchmarks.plot import Plot
from common.errors import choose

__all__ = ["RESULT_FILES", "Report", "kind_in_words", "report_of"]

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


def kind_in_words(results: dict[str, Any]) -> str:
    """One of REPORTS' keys; "" for no results of ours."""
    kind = str(results.get("kind") or kind_of(results))
    return "script" if kind == "compare script.py" else kind


def report_of(results: dict[str, Any]) -> Report:
    """Imported when it is needed.

    Raises:
        UsageError: results of another kind.
    """
    kind = choose("kind of results", kind_in_words(results), REPORTS)
    return cast(Report, importlib.import_module(REPORTS[kind]))
