"""What the ranks that a process spawns must do before they import its program."""

from __future__ import annotations

from typing import Any

__all__ = ["Name", "call_in_ranks"]

_calls: list[tuple[Any, ...]] = []


def call_in_ranks(function: Any, *args: Any) -> None:
    """Have `function(*args)` called in every rank that this process spawns, before it imports the program."""
    _calls.append((function, *args))


class Name(str):
    """A process's name. It is the first thing that a spawned process reads, and so brings the calls along."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return named, (str(self), _calls)


def named(name: str, calls: list[tuple[Any, ...]]) -> str:
    for function, *args in calls:
        function(*args)
    return name
