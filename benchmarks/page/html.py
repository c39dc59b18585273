"""A report as one HTML page that needs no network and no script, and by its policy is allowed none."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.page.document import Report
from benchmarks.page.language import language_tag, say

__all__ = ["to_html"]


def to_html(report: Report) -> str:
    """The whole page, in the report's language; every string of the report is escaped."""
    words = {"verdict": say("Verdict"), "contents": say("Contents")}
    page = _templates().get_template("page.html")
    return page.render(report=report, language=language_tag(), words=words)


@cache
def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
