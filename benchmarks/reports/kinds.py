"""The kinds of result files, the module that reports each, and the writing of a report."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol, cast

from benchmarks.page.language import speaking
from benchmarks.page.plot import Plot
from benchmarks.records.result_files import kind_of
from common.errors import choose

__all__ = ["REPORTS", "RESULT_FILES", "Pages", "Report", "report_of", "write_report"]

REPORTS = {
    "compare": "benchmarks.reports.compare_page",
    "script": "benchmarks.reports.script",
    "sweep": "benchmarks.reports.sweep",
    "accuracy": "benchmarks.reports.accuracy",
    "crossover": "benchmarks.reports.crossover",
}
RESULT_FILES = ("results.json", "script.json", "sweep.json", "accuracy.json", "crossover.json")


class Pages(Protocol):
    """A module that reports a file as a whole; where a certificate failed, without any speed."""

    def verdict(self, results: dict[str, Any]) -> list[str]:
        """The outcome in plain sentences."""

    def to_html(self, results: dict[str, Any]) -> str:
        """The whole report of this file."""

    def to_markdown(self, results: dict[str, Any]) -> str:
        """The whole report of this file."""


class Report(Pages, Protocol):
    """A module whose results may be a part of a larger job."""

    def plots(self, results: dict[str, Any]) -> list[Plot]:
        """Their names begin with the kind, and are unique among one file's plots."""

    def sections(self, results: dict[str, Any]) -> list[str]:
        """Sections of a page, as `html_page.section` makes them; among them a `plot_section` for every plot."""


def report_of(results: dict[str, Any]) -> Report:
    """Imported when it is needed.

    Raises:
        UsageError: results of another kind.
    """
    kind = choose("kind of results", kind_of(results), REPORTS)
    return cast(Report, importlib.import_module(REPORTS[kind]))


def write_report(results: dict[str, Any], folder: Path, name: str, language: str) -> None:
    """Write `name`.md and `name`.html to `folder`, in one of `language.LANGUAGES`; of a whole job as well."""
    job = kind_of(results) == "suite"
    report = cast(Pages, importlib.import_module("benchmarks.reports.suite")) if job else report_of(results)
    with speaking(language):
        texts = {"md": report.to_markdown(results), "html": report.to_html(results)}
    for end, text in texts.items():
        (folder / f"{name}.{end}").write_text(text, encoding="utf-8")
