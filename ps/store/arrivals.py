"""Which words of a step's parameters have come."""

from __future__ import annotations

__all__ = ["Arrivals"]


class Arrivals:
    """Words that have come in pieces of any order, as few runs as there can be."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> None:
        """Words start..stop have come."""
        apart = [(a, b) for a, b in self._runs if b < start or stop < a]
        joined = [(start, stop), *(run for run in self._runs if run not in apart)]
        self._runs = [*apart, (min(a for a, _ in joined), max(b for _, b in joined))]

    def cover(self, start: int, stop: int) -> bool:
        """Whether all of words start..stop have come; of no words they have."""
        return start >= stop or any(a <= start and stop <= b for a, b in self._runs)

    def clear(self) -> None:
        """Nothing has come of the next step."""
        self._runs = []
