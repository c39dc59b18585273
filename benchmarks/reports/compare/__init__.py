"""The report of a comparison (results.json)."""

from benchmarks.reports.compare.report import report
from benchmarks.reports.compare.verdict import verdict

__all__ = ["report", "verdict"]
