"""The report of a comparison as one HTML page that needs no network, and as a chapter of a larger one."""

from __future__ import annotations

from html import escape

from benchmarks import figures
from benchmarks.figures import COLUMNS, cells, leads
from benchmarks.html_page import page, plot_section, row, section, table, verdict_box
from benchmarks.plot import Plot
from benchmarks.report import (
    DEFINITIONS,
    MARKS,
    Results,
    certified,
    describe,
    environment,
    groups,
    holds,
    notes,
    to_markdown,
    verdict,
    workload,
)

__all__ = ["definitions", "environment_section", "plots", "sections", "to_html", "to_markdown", "verdict"]

TITLE = "GradSync: parameter server against ring all-reduce"


def to_html(results: Results) -> str:
    """The whole report as a page; every string of the results is escaped."""
    drawn = plots(results)
    job = f'<p class="muted">{escape(workload(results))}</p>' if drawn else ""
    box = verdict_box(verdict(results), failed=not holds(results))
    last = [*([definitions()] if drawn else []), environment_section(results)]
    return page(TITLE, job + box, [*sections(results), *last], drawn)


def plots(results: Results) -> list[Plot]:
    """The three plots; none without speeds."""
    measured = groups(results)
    return figures.plots(measured) if measured else []


def sections(results: Results) -> list[str]:
    """The certificate, and if there are speeds, the plots and the table of them."""
    table_of_speeds = [_results(results)] if groups(results) else []
    return [_certificate(results), *map(plot_section, plots(results)), *table_of_speeds]


def _certificate(results: Results) -> str:
    certificate = results["certificate"]
    looks: dict[bool | str | None, str] = {True: "good", False: "bad"}
    lines = [
        row(
            [
                escape(name),
                f'<span class="{looks.get(same, "muted")}">{MARKS[same]}</span>',
                f"<code>{escape(digest[:12])}</code>",
            ]
        )
        for name, same, digest in certified(results)
    ]
    differences = [f"<li>{escape(describe(found))}</li>" for found in certificate["differences"]]
    parts = [
        "<p>Before anything is timed, all contestants train the same model from the same start. Those with the same "
        "number of ranks must end with the same parameters, bit for bit.</p>",
        table(f"Parameters after {certificate['steps']} steps", ("contestant", "bits", "sha256"), [lines]),
        f"<ul>{''.join(differences)}</ul>" if differences else "",
        *(f'<p class="muted">{escape(note)}</p>' for note in notes(results)),
    ]
    return section("Certificate", *parts)


def _results(results: Results) -> str:
    heads = [f"{head}<small>{detail}</small>" for head, detail in COLUMNS]
    bodies = [
        [row(map(escape, cells(run)), look="best" if leads(run, runs) else "") for run in runs]
        for _, runs in groups(results)
    ]
    caption = f"{escape(workload(results))}. Bold: the fastest of its N"
    return section("Results", table(caption, heads, bodies, look="figures wide"))


def definitions() -> str:
    """What the words of a comparison mean."""
    terms = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in DEFINITIONS.items())
    return section("How to read this", f"<dl>{terms}</dl>")


def environment_section(results: Results) -> str:
    """The machine, the versions and the command, of any kind of results."""
    facts = [row(map(escape, fact)) for fact in environment(results)]
    command = f"<pre><code>{escape(results['command'])}</code></pre>"
    facts_table = table("The machine and the versions", ("what", "value"), [facts], look="facts")
    return section("Environment", facts_table, "<p>All of this comes from one command:</p>", command)
