"""programs.json: public programs under Paddle's own groups and under both schemes."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from benchmarks.records.results import Results

__all__ = ["Outcome", "ProgramOutcome", "ProgramsResults"]

How = Literal["same bits", "same output", "ok", "differs", "other output", "failed", "not run"]


class Outcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a program ended under one variant.

    Args:
        how: "same bits": all trained parameters are Paddle's, on every rank. "same output": it trains nothing, and
            printed the same. "ok": it ended well, and Paddle's own runs differ, or nothing can be compared.
        distance: of the parameters from Paddle's, relative to their size (L2 norms), where they differ.
        error: the line that says why it failed.
        output: the ends of its logs in that case.
        seconds: of the whole run, launcher included.
    """

    how: How
    distance: float | None = None
    error: str = ""
    output: list[str] = []
    seconds: float = 0.0

    @property
    def works(self) -> bool:
        return self.how in ("same bits", "same output", "ok")

    def __str__(self) -> str:
        if self.how == "failed":
            return self.error
        return self.how if self.distance is None else f"differs by {self.distance:.1e}"


class ProgramOutcome(Struct, frozen=True, kw_only=True):
    """One program. Paddle's own run is "ok" or "failed"."""

    name: str
    repository: str
    commit: str
    path: str
    settings: str
    paddle: Outcome
    collective: Outcome
    ps: Outcome

    @property
    def works(self) -> bool:
        """As well as under Paddle."""
        return not self.paddle.works or (self.collective.works and self.ps.works)


class ProgramsResults(Results, frozen=True, kw_only=True, tag="programs"):
    """
    Args:
        skipped: why, by name.
    """

    nranks: int
    programs: list[ProgramOutcome]
    skipped: dict[str, str]
