"""Which steps of a training are kept: what ranks tell their servers of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NO_COMMITS", "CommitPlan"]


@dataclass(frozen=True)
class CommitPlan:
    """A commit after every `every` steps, none if 0; the training goes on after step `first`, from its commit or from
    what is still in memory, if that is not 0."""

    every: int = 0
    first: int = 0

    def is_due(self, step: int) -> bool:
        """Whether there is a commit after so many steps."""
        return self.every > 0 and step % self.every == 0


NO_COMMITS = CommitPlan()
