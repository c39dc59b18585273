"""suite.json: what became of the parts of a job."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from benchmarks.records.accuracy import AccuracyResults
from benchmarks.records.compare import CompareResults
from benchmarks.records.crossover import CrossoverResults
from benchmarks.records.results import Results
from benchmarks.records.script import ScriptResults
from benchmarks.records.sweep import SweepResults

__all__ = ["PartRecord", "PartResults", "Status", "SuiteResults"]

Status = Literal["missing", "done", "failed", "wrong", "absent", "incomplete"]
PartResults = CompareResults | ScriptResults | SweepResults | AccuracyResults | CrossoverResults


class PartRecord(Struct, frozen=True, kw_only=True):
    """One command of the job.

    Args:
        status: "wrong": its certificate failed; "absent": this machine cannot run it; "incomplete": the job ended
            before all of its rounds were made.
        reason: for any status but "done".
        results: those of its file; of a wrong part only what has no speed.
    """

    name: str
    title: str
    command: str
    status: Status
    reason: str
    seconds: float
    results: PartResults | None


class SuiteResults(Results, frozen=True, kw_only=True, tag="suite"):
    """
    Args:
        synthetic: whether synthetic data stood in for files that were not given.
    """

    title: str
    synthetic: bool
    parts: list[PartRecord]

    def done(self) -> dict[str, PartResults]:
        """By name, the results of the parts that were measured well."""
        return {part.name: part.results for part in self.parts if part.status == "done" and part.results is not None}
