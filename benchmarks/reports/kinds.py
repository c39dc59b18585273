"""The kinds of result files that may be a part of a larger job, and the module that reports each."""

from __future__ import annotations

from typing import Any, Protocol

from benchmarks.page.document import Report
from benchmarks.records.suite import PartResults
from benchmarks.reports import accuracy, compare, crossover, script, sweep

__all__ = ["KINDS", "Kind", "report_of"]


class Kind(Protocol):
    """A module that reports files of a kind; where a certificate failed, without any speed."""

    def verdict(self, results: Any) -> list[str]:
        """The outcome in plain sentences."""

    def report(self, results: Any) -> Report:
        """The names of its plots begin with the kind, and are unique."""


KINDS: dict[str, Kind] = {
    "compare": compare,
    "script": script,
    "sweep": sweep,
    "accuracy": accuracy,
    "crossover": crossover,
}


def report_of(results: PartResults) -> Kind:
    return KINDS[results.kind]
