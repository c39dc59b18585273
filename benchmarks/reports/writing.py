"""The writing of a report of any kind, whole jobs included."""

from __future__ import annotations

from pathlib import Path

from benchmarks.page import html, markdown
from benchmarks.page.language import speaking
from benchmarks.records.result_files import AnyResults
from benchmarks.reports import faults, programs, scale, suite
from benchmarks.reports.kinds import KINDS, Kind
from common.system.atomic_file import write_file

__all__ = ["REPORTS", "to_html", "to_markdown", "write_report"]

REPORTS: dict[str, Kind] = {**KINDS, "faults": faults, "programs": programs, "scale": scale, "suite": suite}


def to_html(results: AnyResults) -> str:
    return html.to_html(REPORTS[results.kind].report(results))


def to_markdown(results: AnyResults) -> str:
    return markdown.to_markdown(REPORTS[results.kind].report(results))


def write_report(results: AnyResults, folder: Path, name: str, language: str) -> None:
    """Write `name`.md and `name`.html to `folder`, in one of `language.LANGUAGES`."""
    with speaking(language):
        texts = {"md": to_markdown(results), "html": to_html(results)}
    for end, text in texts.items():
        write_file(folder / f"{name}.{end}", text)
