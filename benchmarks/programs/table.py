"""The page of `programs`: a table with every failure."""

from __future__ import annotations

from benchmarks.page.markdown import escape
from benchmarks.records.environment import machine_of
from benchmarks.records.programs import ProgramOutcome, ProgramsResults

__all__ = ["page", "row_of", "summary"]

HEAD = ["| program | settings | Paddle | collective | ps |", "|---|---|---|---|---|"]


def page(results: ProgramsResults) -> str:
    machine = results.environment
    lines = [
        "# Programs of others",
        "",
        *(f"- {line}" for line in summary(results)),
        "",
        f"`{results.command}`, {results.created[:10]}, commit {machine.commit or 'unknown'}, Paddle "
        f"{machine.versions.get('paddlepaddle', '?')}, {escape(machine_of(machine))}",
        "",
        *HEAD,
        *(f"| {source(each)} | {' | '.join(map(escape, row_of(each)[1:]))} |" for each in results.programs),
    ]
    if results.skipped:
        lines += ["", "## Skipped", "", *(f"- {name}: {escape(why)}" for name, why in results.skipped.items())]
    return "\n".join(lines) + "\n"


def row_of(each: ProgramOutcome) -> list[str]:
    return [each.name, each.settings, str(each.paddle), str(each.collective), str(each.ps)]


def source(each: ProgramOutcome) -> str:
    """Its name, as a link to where it is from."""
    return f"[{escape(each.name)}](https://github.com/{each.repository}/blob/{each.commit}/{each.path})"


def summary(results: ProgramsResults) -> list[str]:
    """What came of it, in sentences."""
    under_paddle = [each for each in results.programs if each.paddle.works]
    lines = [f"{len(under_paddle)} of {len(results.programs)} programs work under Paddle with Gloo on CPU."]
    for scheme in ("collective", "ps"):
        outcomes = [getattr(each, scheme) for each in under_paddle]
        works = sum(outcome.works for outcome in outcomes)
        compared = [outcome for outcome in outcomes if outcome.how in ("same bits", "differs")]
        same = sum(outcome.how == "same bits" for outcome in compared)
        lines.append(
            f"{works} of these work under {scheme}. Of {len(compared)} whose parameters can be compared, {same} end in "
            "Paddle's bits."
        )
    return lines
