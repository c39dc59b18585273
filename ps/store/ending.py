"""How a step ends: what all trainers must agree on when they commit."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Ending"]


@dataclass(frozen=True)
class Ending:
    """How a step ends, of which all trainers must have the same opinion.

    Args:
        update: apply the optimizer; otherwise the average is all that is wanted.
        replaced: the program has given the parameters other values; rank 0's are taken first.
        again: use the average that ended the step before, instead of new gradients.
    """

    learning_rate: float
    update: bool = True
    replaced: bool = False
    again: bool = False

    def difference(self, other: Ending) -> tuple[str, str, str] | None:
        """The first disagreement: what this one did, what the other did, and what to do about it."""
        if (self.update, self.again) != (other.update, other.again):
            cure = "all ranks must do the same; a program that reads gradients to decide needs --update trainer"
            return self._did(), other._did(), cure
        if self.learning_rate != other.learning_rate:
            mine = f"has learning rate {self.learning_rate}"
            return mine, f"has {other.learning_rate}", "give all trainers the same learning rate and scheduler"
        if self.replaced != other.replaced:
            mine, theirs = (("changed" if e.replaced else "kept") + " its parameters" for e in (self, other))
            return mine, theirs, "load the same state on all ranks"
        return None

    def _did(self) -> str:
        if not self.update:
            return "read gradients or ran another backward before optimizer.step()"
        return "called optimizer.step() " + ("without another backward" if self.again else "after a backward")
