"""The report of a whole job: one verdict on top, then a chapter for each part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from rich.console import Console
from rich.text import Text

from benchmarks.page import markdown
from benchmarks.page.html_page import chapter, contents, page, verdict_box
from benchmarks.page.language import known, mark, say
from benchmarks.page.plot import Plot
from benchmarks.page.reasons import reason
from benchmarks.records.result_files import kind_of
from benchmarks.reports.compare import environment_table
from benchmarks.reports.compare_page import definitions, environment_section
from benchmarks.reports.kinds import report_of
from benchmarks.reports.recommendation import recommend

__all__ = ["print_summary", "to_html", "to_markdown", "verdict"]

Results = dict[str, Any]  # what lies in suite.json
STATUSES = {
    "failed": mark("Failed"),
    "wrong": mark("Wrong"),
    "absent": mark("Absent"),
    "missing": mark("Missing"),
    "incomplete": mark("Incomplete"),
}


def verdict(results: Results) -> list[str]:
    """What is recommended, how sure it is and what bounds it; what emulated links and stragglers change; then what
    is missing."""
    good = [(known(part["title"]), part["results"]) for part in results["parts"] if part["status"] == "done"]
    lines = [*recommend(good, results["environment"]), *beyond(good)]
    nothing = say("No part measured both schemes on several ranks, so there is nothing to recommend.")
    synthetic = say(
        "Synthetic data of the same shape stand in for MNIST and Fashion-MNIST, whose files were not given "
        "(--data-dir): times are those of the real data, accuracies are not."
    )
    return [*(lines or [nothing]), *([synthetic] if results["synthetic"] else []), *shortcomings(results)]


def beyond(parts: Sequence[tuple[str, Results]]) -> list[str]:
    """What crossover maps and times to accuracy say first."""
    return [
        say("{title}: {line}", title=title, line=line)
        for title, found in parts
        if kind_of(found) in ("crossover", "accuracy")
        for line in report_of(found).verdict(found)[:2]
    ]


def shortcomings(results: Results) -> list[str]:
    """The parts that are not as they should be, those that computed the wrong thing first."""
    said = {
        "wrong": mark("{name} computed the WRONG thing, so no speed of it is shown: {why}."),
        "failed": mark("{name} failed: {why}."),
        "absent": mark("{name} is absent: {why}."),
        "missing": mark("{name} is missing: {why}."),
        "incomplete": mark("{name} is incomplete: {why}."),
    }
    return [
        known(sentence).format(name=known(part["title"]), why=reason(part["reason"]))
        for status, sentence in said.items()
        for part in results["parts"]
        if part["status"] == status
    ]


def is_wrong(results: Results) -> bool:
    return any(part["status"] == "wrong" for part in results["parts"])


def to_html(results: Results) -> str:
    """The whole job as a page; every string of the results is escaped."""
    drawn: list[Plot] = []
    chapters = []
    for part in results["parts"]:
        name = f"part-{part['name']}"
        sections, plots = _body(part, name)
        title = known(part["title"])
        label = say("Verdict on {title}", title=title)
        box = verdict_box(_verdict_of(part), failed=part["status"] != "done", label=label)
        chapters.append(chapter(name, title, box, sections))
        drawn += plots
    links = contents((f"part-{part['name']}", known(part["title"])) for part in results["parts"])
    box = verdict_box(verdict(results), failed=is_wrong(results))
    last = [*([definitions()] if drawn else []), environment_section(results)]
    return page(known(results["title"]), box + links, [*chapters, *last], drawn)


def _body(part: dict[str, Any], name: str) -> tuple[list[str], list[Plot]]:
    """A part's sections and plots, the plots' names made unique on the page."""
    if part["results"] is None:
        return [], []
    report = report_of(part["results"])
    sections, plots = report.sections(part["results"]), report.plots(part["results"])
    for plot in plots:
        sections = [section.replace(f'id="{plot.name}"', f'id="{name}-{plot.name}"') for section in sections]
    command = f'<p class="muted"><code>{escape(part["command"])}</code></p>'
    return [command, *sections], [replace(plot, name=f"{name}-{plot.name}") for plot in plots]


def _verdict_of(part: dict[str, Any]) -> list[str]:
    found = report_of(part["results"]).verdict(part["results"]) if part["results"] is not None else []
    if part["status"] == "done":
        return found
    return [say("{status}: {why}.", status=known(STATUSES[part["status"]]), why=reason(part["reason"])), *found]


def to_markdown(results: Results) -> str:
    """The whole job for a pull request: the verdicts, and each part's report folded away."""
    return "\n\n".join(_paragraphs(results)) + "\n"


def _paragraphs(results: Results) -> Iterator[str]:
    yield f"# {markdown.escape(known(results['title']))}"
    yield markdown.bullets(verdict(results))
    for part in results["parts"]:
        title = known(part["title"])
        yield f"## {markdown.escape(title)}"
        yield markdown.bullets(_verdict_of(part))
        if part["results"] is not None:
            whole = report_of(part["results"]).to_markdown(part["results"])
            summary = say("{title} in figures", title=escape(title))
            yield f"<details><summary>{summary}</summary>\n\n{whole}\n</details>"
    yield f"## {say('Environment')}"
    yield environment_table(results)
    yield f"```console\n{results['command']}\n```"


def print_summary(results: Results, console: Console) -> None:
    """The verdict on a terminal."""
    console.print()
    for line in verdict(results):
        console.print(Text(line, style="bold red" if is_wrong(results) else "bold"))
