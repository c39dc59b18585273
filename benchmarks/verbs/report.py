"""`python -m benchmarks report RESULTS.json`: the report of a result file once more, as in the other language."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.page.language import LANGUAGES
from benchmarks.records.result_files import read
from benchmarks.reports.writing import write_report
from common.errors import choose
from common.launch.cli import check_writable

__all__ = ["ReportConfig", "report_again"]


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Write the report of a result file once more: report.md and report.html. Nothing is measured."""

    results: tyro.conf.Positional[Path]
    """results.json, script.json, sweep.json, crossover.json, accuracy.json, suite.json, or a file of a history."""
    lang: str = "en"
    """Language of the report: en or zh."""
    out: Path = Path("out/report")
    """Folder for report.md and report.html."""

    def __post_init__(self) -> None:
        choose("language", self.lang, LANGUAGES)


def report_again(config: ReportConfig) -> None:
    """
    Raises:
        DataError: the file cannot be read, or holds no results that this version understands.
        UsageError: the report cannot be written.
    """
    results = read(config.results)
    check_writable("out", config.out / "report.html", make_folder=True)
    write_report(results, config.out, "report", config.lang)
    print(f"report: {config.out / 'report.html'} ({results.kind})")
