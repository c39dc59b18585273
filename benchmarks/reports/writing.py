"""The writing of a report of any kind, whole jobs included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.page import html, markdown
from benchmarks.page.language import speaking
from benchmarks.records.result_files import AnyResults, plain
from benchmarks.reports import suite
from benchmarks.reports.kinds import KINDS, Kind
from common.errors import choose

__all__ = ["REPORTS", "to_html", "to_markdown", "write_report"]

Results = dict[str, Any]  # of any kind
REPORTS: dict[str, Kind] = {**KINDS, "suite": suite}


def to_html(results: Results) -> str:
    """
    Raises:
        UsageError: results of a kind that has no report.
    """
    return html.to_html(_kind(results).report(results))


def to_markdown(results: Results) -> str:
    """
    Raises:
        UsageError: results of a kind that has no report.
    """
    return markdown.to_markdown(_kind(results).report(results))


def _kind(results: Results) -> Kind:
    return REPORTS[choose("kind of results", str(results["kind"]), REPORTS)]


def write_report(typed: AnyResults, folder: Path, name: str, language: str) -> None:
    """Write `name`.md and `name`.html to `folder`, in one of `language.LANGUAGES`."""
    results = plain(typed)
    with speaking(language):
        texts = {"md": to_markdown(results), "html": to_html(results)}
    for end, text in texts.items():
        (folder / f"{name}.{end}").write_text(text, encoding="utf-8")
