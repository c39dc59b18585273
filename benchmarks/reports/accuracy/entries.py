"""The contestants of `accuracy` under each straggler: medians and bands over seeds, and their numbers as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from benchmarks.page.language import say
from benchmarks.records.accuracy import AccuracyResults, AccuracyRun, Job
from benchmarks.reports.runs import colours_of, series

__all__ = [
    "Entry",
    "Spread",
    "colours",
    "entries",
    "missed",
    "not_reached",
    "percent",
    "seconds",
    "straggler_words",
]


class Spread(NamedTuple):
    """Over seeds: the median, the least and the greatest."""

    middle: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(median(values), min(values), max(values))

    def overlaps(self, other: Spread) -> bool:
        return self.low <= other.high and other.low <= self.high

    def text(self, number: Callable[[float], str], unit: str = "") -> str:
        band = f" ({number(self.low)}–{number(self.high)})" if self.low < self.high else ""
        return f"{number(self.middle)}{unit}{band}"


@dataclass(frozen=True)
class Entry:
    """One contestant under one straggler: a run for each seed."""

    name: str
    straggler: str
    runs: list[AccuracyRun]

    @property
    def rate(self) -> Spread:
        """Samples/s of all ranks."""
        return self._over_seeds("samples_per_s")

    @property
    def target(self) -> Spread:
        """Seconds to the target; infinite where it was not reached."""
        return Spread.of([math.inf if run.target_s is None else run.target_s for run in self.runs])

    @property
    def reached(self) -> int:
        """How many seeds reached the target."""
        return sum(run.target_s is not None for run in self.runs)

    @property
    def whole(self) -> Spread:
        """Seconds of the whole training."""
        return self._over_seeds("seconds")

    @property
    def accuracy(self) -> Spread:
        """On the test split at the end, 0..1."""
        return self._over_seeds("accuracy")

    def curve(self, key: Literal["accuracy", "loss"]) -> list[tuple[float, Spread]]:
        """Every evaluation: the median of its seconds, and what it found."""
        together = zip(*(run.points for run in self.runs), strict=False)
        return [
            (median(point.seconds for point in points), Spread.of([getattr(point, key) for point in points]))
            for points in together
        ]

    def _over_seeds(self, key: str) -> Spread:
        return Spread.of([getattr(run, key) for run in self.runs])


def entries(results: AccuracyResults) -> list[list[Entry]]:
    """By straggler, contestants in the order of the certificate's and then of the modes."""
    found: dict[str, dict[str, Entry]] = {}
    for run in results.runs:
        mine = found.setdefault(run.straggler, {})
        mine.setdefault(_name(run), Entry(_name(run), run.straggler, [])).runs.append(run)
    order = sorted(found, key=("none", "permanent", "random").index)
    return [list(found[straggler].values()) for straggler in order]


def _name(run: AccuracyRun) -> str:
    """As in "ps/shm sync", "ps/shm ssp:2", "ring/shm"."""
    return f"{series(run)}{' sync' if run.scheme == 'ps' and run.mode == 'sync' else ''}"


def straggler_words(straggler: str, job: Job) -> str:
    """Who is slow, as in "rank 1 slowed 3x"."""
    if straggler == "permanent":
        return say("rank {rank} slowed {factor:g}x", rank=job.nranks - 1, factor=job.factor)
    if straggler == "random":
        return say("a random rank slowed {factor:g}x in each step", factor=job.factor)
    return say("no straggler")


def short(value: float) -> str:
    """Seconds in about three digits."""
    if not math.isfinite(value):
        return say("not reached")
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def seconds(value: float | Spread) -> str:
    return value.text(short, " s") if isinstance(value, Spread) else f"{short(value)} s"


def percent(value: float | Spread) -> str:
    def number(share: float) -> str:
        return f"{100 * share:.1f}"

    return value.text(number, " %") if isinstance(value, Spread) else f"{100 * value:g} %"


def not_reached(entry: Entry) -> str:
    return say("not reached in {time}", time=seconds(entry.whole.middle))


def missed(entry: Entry) -> str:
    if not entry.reached:
        return not_reached(entry)
    return say(
        "{not_reached} by {missed} of {seeds} seeds",
        not_reached=not_reached(entry),
        missed=len(entry.runs) - entry.reached,
        seeds=len(entry.runs),
    )


def colours(results: AccuracyResults) -> dict[str, str]:
    """By the names of entries."""
    shades = colours_of(results.runs)
    return {_name(run): shades[series(run)] for run in results.runs}
