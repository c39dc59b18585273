"""The runs of trainings: how they are named, coloured and ranked, and their numbers as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from benchmarks.contestants.table_of_trainings import TORCH
from benchmarks.page.charts import OTHERS
from benchmarks.records.compare import Run
from benchmarks.stats.interval import LEAST_ROUNDS
from ps.store.modes import parse_mode

__all__ = [
    "KNOWN",
    "Group",
    "Named",
    "colours_of",
    "fastest",
    "in_step",
    "milliseconds",
    "races",
    "rate",
    "series",
    "tied",
    "winner",
]

Group = tuple[int, list[Run]]  # a number of ranks and its runs

# Warm is the parameter server, cool the ring; all are apart for colour-blind eyes, and on white as on black.
KNOWN = {
    "local": "#7f8894",
    "ps/shm": "#c77700",
    "ps/shm S=2": "#cc3311",
    "ps/tcp": "#8c564b",
    "ps/grpc": "#a05195",
    "ring/shm": "#0077bb",
    "ring/tcp": "#1aa0b8",
}


class Named(Protocol):
    """Whatever belongs to one contestant, as in "ring/shm N=2"."""

    @property
    def contestant(self) -> str:
        """Its name, with its number of ranks."""


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def milliseconds(value: float) -> str:
    """Three digits, or all those before the point: columns of them stay narrow."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def series(run: Named) -> str:
    """The contestant without its number of ranks: what has one name and one colour for all N."""
    return " ".join(word for word in str(run.contestant).split() if not word.startswith("N="))


def in_step(run: Run) -> bool:
    """Whether it computes the same as the others."""
    return parse_mode(run.mode).in_step


def races(run: Run) -> bool:
    """Whether only its way to synchronise can make it faster than the others: it computes the same, with Paddle too."""
    return in_step(run) and run.scheme != TORCH


def fastest(runs: Iterable[Run]) -> Run:
    """Of those that race, if any do."""
    return max(runs, key=lambda run: (races(run), float(run.samples_per_s)))


def winner(runs: Sequence[Run]) -> Run | None:
    """The fastest of those that race; None where they are too few, or measured in too few rounds, or where the best of
    another scheme is within noise of it."""
    racing = [run for run in runs if races(run)]
    if len(racing) < 2 or min(run.repetitions for run in racing) < LEAST_ROUNDS:
        return None
    first = fastest(racing)
    rivals = [run for run in racing if run.scheme != first.scheme]
    return None if rivals and tied(first, fastest(rivals)) else first


def tied(one: Run, other: Run) -> bool:
    """Whether they are within noise of each other."""
    return not one.rate.against(other.rate)


def colours_of(runs: Iterable[Named]) -> dict[str, str]:
    """A colour for each series, the known ones first."""
    names = list(dict.fromkeys(series(run) for run in runs))
    others = [name for name in names if name not in KNOWN]
    known = {name: colour for name, colour in KNOWN.items() if name in names}
    return known | {name: OTHERS[index % len(OTHERS)] for index, name in enumerate(others)}
