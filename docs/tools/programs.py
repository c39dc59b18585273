"""The table of others' programs in the pages, and its sums, from the results of `python -m benchmarks programs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import msgspec

from benchmarks.page.markdown import escape
from benchmarks.records.programs import Outcome, ProgramsResults
from benchmarks.reports.programs import row_of
from docs.tools.results import RESULTS

__all__ = ["ends", "sums"]


@cache
def typed(name: str) -> ProgramsResults:
    return msgspec.json.decode((RESULTS / name).read_bytes(), type=ProgramsResults)


def ends(name: str) -> list[list[str]]:
    """Of each program: how it ended under Paddle, `collective` and `ps`."""
    return [[escape(cell) for cell in row_of(each)[2:]] for each in typed(name).programs]


def sums(name: str) -> dict[str, Callable[[], str]]:
    """How many there are, work under Paddle, and then under each scheme; and of those compared with Paddle's bits how
    many have them."""
    found: dict[str, Callable[[], str]] = {
        "programs": lambda: str(len(typed(name).programs)),
        "programs-paddle": lambda: str(len(_under_paddle(name, "paddle"))),
    }
    for scheme in ("collective", "ps"):
        found |= {
            f"programs-{scheme}": partial(_count, name, scheme, ("same bits", "same output", "ok")),
            f"programs-{scheme}-compared": partial(_count, name, scheme, ("same bits", "differs")),
            f"programs-{scheme}-same": partial(_count, name, scheme, ("same bits",)),
        }
    return found


def _count(name: str, scheme: str, how: Sequence[str]) -> str:
    return str(sum(outcome.how in how for outcome in _under_paddle(name, scheme)))


def _under_paddle(name: str, variant: str) -> list[Outcome]:
    """How those that work under Paddle ended."""
    return [getattr(each, variant) for each in typed(name).programs if each.paddle.works]
