"""The report of times to accuracy (accuracy.json)."""

from benchmarks.reports.accuracy.report import report
from benchmarks.reports.accuracy.verdict import verdict

__all__ = ["report", "verdict"]
