"""The report of a whole job: one verdict on top, then a chapter for each part."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from benchmarks.page.document import Bullets, Chapter, Command, Fold, Report, Section
from benchmarks.page.language import known, mark, say
from benchmarks.page.reasons import reason
from benchmarks.records.accuracy import AccuracyResults
from benchmarks.records.crossover import CrossoverResults
from benchmarks.records.results import Results
from benchmarks.records.suite import PartRecord, PartResults, SuiteResults
from benchmarks.reports.compare.report import how_to_read
from benchmarks.reports.facts import environment
from benchmarks.reports.kinds import report_of
from benchmarks.reports.recommendation import grounds, picture, recommend

__all__ = ["print_summary", "report", "verdict"]

STATUSES = {
    "failed": mark("Failed"),
    "wrong": mark("Wrong"),
    "absent": mark("Absent"),
    "missing": mark("Missing"),
    "incomplete": mark("Incomplete"),
}


def verdict(results: SuiteResults) -> list[str]:
    """Which scheme, in one sentence of all comparisons and one of each crossover map; where there are neither, what
    times to accuracy say first. Then what is missing. The grounds, and what each part says, stand further down."""
    good = _good(results)
    lines = [*recommend(good, results.environment), *_first(good, CrossoverResults, 1)]
    nothing = say("No part measured both schemes on several ranks, so no scheme can be recommended.")
    synthetic = say(
        "Without --data-dir, synthetic data of the same shape stand in for MNIST and Fashion-MNIST. The times are"
        " realistic, the accuracies are not."
    )
    return [
        *(lines or _first(good, AccuracyResults, 2) or [nothing]),
        *([synthetic] if results.synthetic else []),
        *shortcomings(results),
    ]


def _good(results: SuiteResults) -> list[tuple[str, PartResults]]:
    """Title and results of each part that ended well."""
    titles = {part.name: known(part.title) for part in results.parts}
    return [(titles[name], found) for name, found in results.done().items()]


def _first(parts: Sequence[tuple[str, PartResults]], kind: type[Results], count: int) -> list[str]:
    """So many sentences of the verdict of each part of a kind."""
    return [
        say("{title}: {line}", title=title, line=line)
        for title, found in parts
        if isinstance(found, kind)
        for line in report_of(found).verdict(found)[:count]
    ]


def shortcomings(results: SuiteResults) -> list[str]:
    """The parts that are not as they should be, those that computed the wrong thing first."""
    said = {
        "wrong": mark("{name} computed the WRONG thing, so no speed of it is shown: {why}."),
        "failed": mark("{name} failed: {why}."),
        "absent": mark("{name} is absent: {why}."),
        "missing": mark("{name} is missing: {why}."),
        "incomplete": mark("{name} is incomplete: {why}."),
    }
    return [
        known(sentence).format(name=known(part.title), why=reason(part.reason))
        for status, sentence in said.items()
        for part in results.parts
        if part.status == status
    ]


def is_wrong(results: SuiteResults) -> bool:
    return any(part.status == "wrong" for part in results.parts)


def report(results: SuiteResults) -> Report:
    chapters = [_chapter(part) for part in results.parts]
    shown = any(chapter.sections and not chapter.failed for chapter in chapters)
    return Report(
        known(results.title),
        verdict(results),
        _two_schemes(results),
        [*([how_to_read()] if shown else []), environment(results)],
        failed=is_wrong(results),
        chapters=chapters,
    )


def _two_schemes(results: SuiteResults) -> list[Section]:
    """Their picture, and the grounds of the recommendation behind a click."""
    good = _good(results)
    if not (plots := picture(good)):
        return []
    why = Fold(say("How sure this is, and what bounds it"), [Bullets(grounds(good, results.environment))])
    return [*map(Section.of, plots), Section("", [why])]


def _chapter(part: PartRecord) -> Chapter:
    name, title, lines = f"part-{part.name}", known(part.title), _verdict_of(part)
    if part.results is None:
        return Chapter(name, title, lines, [], failed=True)
    found = report_of(part.results).report(part.results)
    sections = [*found.sections, Section("", [Command(part.command)])]
    return Chapter(name, title, lines, sections, found.about, failed=part.status != "done")


def _verdict_of(part: PartRecord) -> list[str]:
    found = report_of(part.results).verdict(part.results) if part.results is not None else []
    if part.status == "done":
        return found
    return [say("{status}: {why}.", status=known(STATUSES[part.status]), why=reason(part.reason)), *found]


def print_summary(results: SuiteResults, console: Console) -> None:
    """The verdict on a terminal."""
    console.print()
    for line in verdict(results):
        console.print(Text(line, style="bold red" if is_wrong(results) else "bold"))
