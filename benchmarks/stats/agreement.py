"""Do two runs of one command agree? Whether each median lies in the other run's interval, and who wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from benchmarks.stats.interval import Measured

__all__ = ["Agreement", "Figure", "agreement"]


@dataclass(frozen=True)
class Figure:
    """The time of one thing: median and interval over repetitions, in ms (of `compare`: of a thousand samples; of
    `accuracy`: to the target).

    Args:
        ours: not another library, nor a limit of the machine.
        race: those of one run that have this in common are compared with one another; "": with none.
        rounds: the times, round by round, where they are known.
    """

    time: float
    low: float
    high: float
    ours: bool = True
    race: str = ""
    rounds: tuple[float, ...] = ()

    @property
    def measured_once(self) -> bool:
        """So that its noise is unknown."""
        return self.low == self.high

    def against(self, other: Figure, *, same_rounds: bool) -> int:
        """-1 if this is faster beyond noise, 1 if slower, else 0; see Measured."""
        mine, theirs = (Measured(each.time, each.low, each.high, each.rounds) for each in (self, other))
        return mine.against(theirs, same_rounds=same_rounds)


@dataclass(frozen=True)
class Agreement:
    """Of two runs.

    Args:
        inside, medians: how many of so many medians, of both runs, lie in the other run's interval.
        flipped: pairs of one race of which one is faster in the first run, the other in the second.
        pairs: how many there are in all races.
    """

    inside: int
    medians: int
    flipped: list[tuple[str, str]]
    pairs: int

    def lines(self) -> list[str]:
        """In words; none, if everything was measured once."""
        if not self.medians:
            return []
        share = f"{self.inside} of {self.medians} medians ({self.inside / self.medians:.0%})"
        told = f"{share} lie in the other run's interval"
        if self.pairs:
            told += f"; {len(self.flipped)} of {self.pairs} pairs have another winner"
        return [told, *(f"another winner: {a} / {b}" for a, b in self.flipped)]


def agreement(before: Mapping[str, Figure], after: Mapping[str, Figure]) -> Agreement:
    """Of the figures that both have, but for those measured once."""
    both = {
        name: (figure, after[name])
        for name, figure in before.items()
        if name in after and not figure.measured_once and not after[name].measured_once
    }
    inside = sum((b.low <= a.time <= b.high) + (a.low <= b.time <= a.high) for a, b in both.values())
    raced = [name for name in both if both[name][0].race]
    pairs = [(one, other) for one, other in combinations(raced, 2) if both[one][0].race == both[other][0].race]
    flipped = [
        (one, other)
        for one, other in pairs
        if both[one][0].against(both[other][0], same_rounds=True)
        * both[one][1].against(both[other][1], same_rounds=True)
        < 0
    ]
    return Agreement(inside, 2 * len(both), flipped, len(pairs))
