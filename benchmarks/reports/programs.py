"""The report of others' programs (programs.json): how each ended under Paddle and under both schemes."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.page.document import Bullets, Cell, Report, Row, Section, Table
from benchmarks.page.language import known, mark, say
from benchmarks.records.programs import Outcome, ProgramOutcome, ProgramsResults
from benchmarks.reports.facts import environment

__all__ = ["report", "row_of", "verdict"]

SCHEMES = ("collective", "ps")
HOW = (mark("same bits"), mark("same output"), mark("ok"), mark("other output"), mark("not run"))


def verdict(results: ProgramsResults) -> list[str]:
    """What came of it, in sentences."""
    under_paddle = [each for each in results.programs if each.paddle.works]
    lines = [
        say(
            "{works} of {count} programs work under Paddle with Gloo on CPU.",
            works=len(under_paddle),
            count=len(results.programs),
        )
    ]
    for scheme in SCHEMES:
        outcomes = [getattr(each, scheme) for each in under_paddle]
        compared = [outcome for outcome in outcomes if outcome.how in ("same bits", "differs")]
        lines.append(
            say(
                "{works} of these work under {scheme}. Of {compared} whose parameters can be compared, {same} end in "
                "Paddle's bits.",
                works=sum(outcome.works for outcome in outcomes),
                scheme=scheme,
                compared=len(compared),
                same=sum(outcome.how == "same bits" for outcome in compared),
            )
        )
    return lines


def report(results: ProgramsResults) -> Report:
    heads = (say("program"), say("settings"), "Paddle", *SCHEMES, say("source"))
    rows = [_row(each) for each in results.programs]
    skipped = [say("{name}: {why}.", name=name, why=why.rstrip(".")) for name, why in results.skipped.items()]
    return Report(
        say("GradSync: programs of others"),
        verdict(results),
        [
            Section(say("Each program"), [Table(say("How it ended"), heads, [rows], wide=True)]),
            *([Section(say("Not run"), [Bullets(skipped)])] if skipped else []),
        ],
        [environment(results)],
        failed=not all(each.works for each in results.programs),
    )


def _row(each: ProgramOutcome) -> Row:
    place = f"{each.repository} {each.commit[:10]} {each.path}"
    ends = [_cell(outcome) for outcome in (each.paddle, each.collective, each.ps)]
    return Row((each.name, Cell(each.settings, "code"), *ends, Cell(place, "code")))


def _cell(outcome: Outcome) -> Cell:
    look = "muted" if outcome.how == "not run" else "good" if outcome.works else "bad"
    if outcome.distance is not None:
        return Cell(say("differs by {distance:.1e}", distance=outcome.distance), look)
    return Cell(known(str(outcome)), look)


def row_of(each: ProgramOutcome) -> Sequence[str]:
    """For the terminal."""
    return [each.name, each.settings, str(each.paddle), str(each.collective), str(each.ps)]
