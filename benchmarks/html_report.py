"""The report of a comparison as one HTML page that needs no network."""

from __future__ import annotations

from html import escape

from benchmarks.figures import COLUMNS, cells, leads, plots
from benchmarks.html_page import page, plot_section, row, section, table, verdict_box
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
    verdict,
    workload,
)

__all__ = ["environment_section", "to_html"]

TITLE = "GradSync: parameter server against ring all-reduce"


def to_html(results: Results) -> str:
    """The whole report as a page; every string of the results is escaped."""
    measured = groups(results)
    drawn = plots(measured) if measured else []
    sections = [_certificate(results), *map(plot_section, drawn)]
    if measured:
        sections += [_results(results), _definitions()]
    job = f'<p class="muted">{escape(workload(results))}</p>' if measured else ""
    box = verdict_box(verdict(results), failed=not holds(results))
    return page(TITLE, job + box, [*sections, environment_section(results)], drawn)


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
    caption = "Bold: the fastest of its N"
    return section("Results", table(caption, heads, bodies, look="figures wide"))


def _definitions() -> str:
    terms = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in DEFINITIONS.items())
    return section("How to read this", f"<dl>{terms}</dl>")


def environment_section(results: Results) -> str:
    """The machine, the versions and the command, of any kind of results."""
    facts = [row(map(escape, fact)) for fact in environment(results)]
    command = f"<pre><code>{escape(results['command'])}</code></pre>"
    facts_table = table("The machine and the versions", ("what", "value"), [facts], look="facts")
    return section("Environment", facts_table, "<p>All of this comes from one command:</p>", command)
