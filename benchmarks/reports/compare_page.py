"""The report of a comparison as one HTML page that needs no network, and as a chapter of a larger one."""

from __future__ import annotations

from html import escape

from benchmarks.page.html_page import page, plot_section, row, section, table, verdict_box
from benchmarks.page.language import say
from benchmarks.page.plot import Plot
from benchmarks.reports import compare_figures as figures
from benchmarks.reports.compare import (
    Results,
    certified,
    describe,
    environment,
    groups,
    holds,
    in_words,
    notes,
    terms,
    to_markdown,
    verdict,
    workload,
)
from benchmarks.reports.compare_figures import cells, columns, leads

__all__ = ["definitions", "environment_section", "plots", "sections", "to_html", "to_markdown", "verdict"]


def to_html(results: Results) -> str:
    """The whole report as a page; every string of the results is escaped."""
    drawn = plots(results)
    job = f'<p class="muted">{escape(workload(results))}</p>' if drawn else ""
    box = verdict_box(verdict(results), failed=not holds(results))
    last = [*([definitions()] if drawn else []), environment_section(results)]
    title = say("GradSync: parameter server against ring all-reduce")
    return page(title, job + box, [*sections(results), *last], drawn)


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
                f'<span class="{looks.get(same, "muted")}">{in_words(same)}</span>',
                f"<code>{escape(digest[:12])}</code>",
            ]
        )
        for name, same, digest in certified(results)
    ]
    differences = [f"<li>{escape(describe(found))}</li>" for found in certificate["differences"]]
    about = say(
        "Before anything is timed, all contestants train the same model from the same start. Those with the same "
        "number of ranks must end with the same parameters, bit for bit."
    )
    caption = say("Parameters after {steps} steps", steps=certificate["steps"])
    parts = [
        f"<p>{about}</p>",
        table(caption, (say("contestant"), say("bits"), "sha256"), [lines]),
        f"<ul>{''.join(differences)}</ul>" if differences else "",
        *(f'<p class="muted">{escape(note)}</p>' for note in notes(results)),
    ]
    return section(say("Certificate"), *parts)


def _results(results: Results) -> str:
    heads = [f"{head}<small>{detail}</small>" for head, detail in columns()]
    bodies = [
        [row(map(escape, cells(run)), look="best" if leads(run, runs) else "") for run in runs]
        for _, runs in groups(results)
    ]
    caption = say("{job}. Bold: the fastest of its N", job=escape(workload(results)))
    return section(say("Results"), table(caption, heads, bodies, look="figures wide"))


def definitions() -> str:
    """What the words of a comparison mean."""
    pairs = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in terms().items())
    return section(say("How to read this"), f"<dl>{pairs}</dl>")


def environment_section(results: Results) -> str:
    """The machine, the versions and the command, of any kind of results."""
    facts = [row(map(escape, fact)) for fact in environment(results)]
    command = f"<pre><code>{escape(results['command'])}</code></pre>"
    facts_table = table(say("The machine and the versions"), (say("what"), say("value")), [facts], look="facts")
    return section(say("Environment"), facts_table, f"<p>{say('All of this comes from one command:')}</p>", command)
