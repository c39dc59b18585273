"""What the rounds of one number of ranks have found so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from msgspec import convert, to_builtins

from benchmarks.operations.group import WARMUP, MeasuredGroup
from benchmarks.records.sweep import Waiting
from common.system.process_memory import ProcessMemory

__all__ = ["Measured"]

FEWEST, MOST = 5, 5000  # iterations of one size in one round; more at once are many numbers to hand over
MOST_ON_TRIAL = 500  # calls from which it is told how many these and those before them are to be
WARM_UP_S = 0.3  # before those, at most: ranks that have slept share a core until the kernel has spread them
BY_KEY = ("medians", "wrong", "iterations", "warmups")  # of Measured


@dataclass
class Measured:
    """By backend and bytes: the median of each round in seconds, wrong elements, iterations a round, calls before."""

    medians: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    wrong: dict[tuple[str, int], int] = field(default_factory=dict)
    iterations: dict[tuple[str, int], int] = field(default_factory=dict)
    warmups: dict[tuple[str, int], int] = field(default_factory=dict)
    memory: dict[str, ProcessMemory] = field(default_factory=dict)  # by backend: of a server, at the largest size
    failed: dict[str, str] = field(default_factory=dict)  # by backend: why
    waiting: list[Waiting] = field(default_factory=list)

    def add(self, group: MeasuredGroup, nbytes: int, seconds: float, *, with_memory: bool = False) -> None:
        """One series.

        Args:
            seconds: about how long it is to run.
            with_memory: whether to note that of servers.
        """
        key = (group.backend, nbytes)
        if key not in self.iterations:
            before = warm_up_of(seconds)
            once, self.wrong[key] = seconds_of_a_call(group, nbytes, before)
            self.iterations[key] = max(FEWEST, min(MOST, int(seconds / once)))
            self.warmups[key] = max(WARMUP, int(before / once))
        times, bad = group.measure(nbytes, self.iterations[key], warmup=self.warmups[key])
        self.medians.setdefault(key, []).append(median(times))
        self.wrong[key] = self.wrong.get(key, 0) + bad
        if with_memory:
            self._note_memory(group)

    def to_json(self) -> dict[str, Any]:
        """As it is kept between rounds."""
        by_key = {name: [[*key, value] for key, value in getattr(self, name).items()] for name in BY_KEY}
        memory = {backend: asdict(found) for backend, found in self.memory.items()}
        return {**by_key, "memory": memory, "failed": self.failed, "waiting": to_builtins(self.waiting)}

    def restore(self, content: Mapping[str, Any]) -> None:
        """Take up what `to_json` made."""
        for name in BY_KEY:
            getattr(self, name).update({(backend, nbytes): value for backend, nbytes, value in content[name]})
        self.memory |= {backend: ProcessMemory(**found) for backend, found in content["memory"].items()}
        self.failed |= content["failed"]
        self.waiting += convert(content["waiting"], list[Waiting])

    def _note_memory(self, group: MeasuredGroup) -> None:
        """Of the server that uses most, and of all rounds the most."""
        for found in group.server_memory():
            most = self.memory.get(group.backend, found)
            self.memory[group.backend] = ProcessMemory(max(most.pss, found.pss), max(most.own, found.own))


def warm_up_of(seconds: float) -> float:
    """In seconds, before each series."""
    return min(WARM_UP_S, 6 * seconds)


def seconds_of_a_call(group: MeasuredGroup, nbytes: int, warm_up: float) -> tuple[float, int]:
    """(about so long takes one when the ranks are awake; elements that were wrong in a first one)."""
    times, wrong = group.measure(nbytes, FEWEST)
    more = min(MOST_ON_TRIAL, int(warm_up / median(times)))
    if more > FEWEST:
        times, _ = group.measure(nbytes, more, check=False)
    return median(times), wrong
