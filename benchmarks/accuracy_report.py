"""What `accuracy` found: in plain sentences, as Markdown, and as sections and plots of a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from benchmarks.accuracy_figures import Entry, entries, not_reached, percent, plots, seconds, straggler_words
from benchmarks.figures import rate
from benchmarks.html_page import page, plot_section, row, section, table, verdict_box
from benchmarks.html_report import environment_section
from benchmarks.report import environment

__all__ = ["plots", "sections", "to_html", "to_markdown", "verdict"]

Results = dict[str, Any]  # what lies in accuracy.json

TITLE = "GradSync: time to accuracy"
HEADS = ("contestant", "samples/s", "time to target", "seeds", "accuracy", "whole training")


def verdict(results: Results) -> list[str]:
    """Who reached the target first under each straggler, by how much, and who did not; then what a straggler costs."""
    groups = entries(results)
    return [*_bits(results), *(_race(group, results["job"]) for group in groups), *_costs(groups, results["job"])]


def _bits(results: Results) -> list[str]:
    certificate, seeds = results["certificate"], results["job"]["seeds"]
    if not certificate["contestants"]:
        return []
    named = _listed(certificate["contestants"])
    each = f"each of {len(seeds)} seeds" if len(seeds) > 1 else "the one seed"
    return [f"{named} ended in the same parameters, bit for bit, with {each}, whoever straggled."]


def _race(group: Sequence[Entry], job: dict[str, Any]) -> str:
    target, words = percent(job["target"]), straggler_words(group[0].straggler, job)
    where = "Without a straggler" if group[0].straggler == "none" else f"With {words}"
    reached = sorted((e for e in group if math.isfinite(e.target.middle)), key=lambda entry: entry.target.middle)
    missing = [f"{entry.name} ({not_reached(entry)}{_some_seeds(entry)})" for entry in group if entry not in reached]
    if not reached:
        return f"{where}, nobody reaches {target}: {_listed(missing)}."
    first, *others = reached
    tied = [entry.name for entry in others if entry.target.overlaps(first.target)]
    later = [
        f"{entry.name} takes {entry.target.middle / first.target.middle:.2f} times as long"
        for entry in others
        if entry.name not in tied
    ]
    noise = f", within noise of {_listed(tied)}" if tied else ""
    parts = [f"{where}, {first.name} reaches {target} first, after {seconds(first.target)}{noise}"]
    parts += [_listed(later)] if later else []
    parts += [f"below the target stay {_listed(missing)}"] if missing else []
    once = "; the noise of one seed is unknown" if len(first.runs) < 2 and others else ""
    return "; ".join(parts) + once + "."


def _some_seeds(entry: Entry) -> str:
    return f" by {len(entry.runs) - entry.reached} of {len(entry.runs)} seeds" if entry.reached else ""


def _costs(groups: Sequence[Sequence[Entry]], job: dict[str, Any]) -> list[str]:
    """How much of its samples/s each contestant keeps."""
    alone = {entry.name: entry.rate.middle for group in groups for entry in group if entry.straggler == "none"}
    return [
        f"Of its samples/s, with {straggler_words(group[0].straggler, job)}, "
        + _listed([f"{entry.name} keeps {entry.rate.middle / alone[entry.name]:.0%}" for entry in group])
        + "."
        for group in groups
        if alone and group[0].straggler != "none"
    ]


def _listed(words: Sequence[str]) -> str:
    """
    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def workload(job: dict[str, Any]) -> str:
    """What was trained, in a sentence."""
    return (
        f"{job['model']} on {job['dataset']}, N={job['nranks']}, batch {job['batch_size']} a rank, {job['optimizer']} "
        f"{job['lr']:g}, {job['steps']:,} steps, evaluated every {job['eval_every']}, seeds "
        f"{', '.join(map(str, job['seeds']))}"
    )


def definitions(job: dict[str, Any]) -> dict[str, str]:
    """What the words mean."""
    return {
        "time to target": f"seconds from the start of the first step until rank 0's parameters first have a test "
        f"accuracy of {percent(job['target'])} or more. Rank 0 keeps a copy of its parameters every "
        f"{job['eval_every']} steps (and after the last one, when all ranks have settled on the same); all copies are "
        f"evaluated on the whole test split after the training, so evaluation takes no time from it. The time is "
        f"known to within {job['eval_every']} steps of rank 0.",
        "straggler": f"a rank that sleeps {job['factor'] - 1:g} times as long as it has computed before its gradients "
        f"are ready, so that they are {job['factor']:g} times as late. Either rank {job['nranks'] - 1} in every step, "
        "or one rank drawn anew for each step, the same draws for all contestants. Sleeping leaves its core to others.",
        "samples/s": "every rank's own rate from its first step to its last, the first few left out; summed.",
        "(min–max)": "over seeds, while every other figure is a median over them. Where these bands overlap, a "
        "difference is within noise. A seed changes the initial parameters and the straggler's draws; the order of "
        "the data is the same.",
        "budget": f"{job['steps']:,} steps of every rank. Where nobody waits for a straggler (async, geo), rank 0 goes "
        "on until all ranks together have made about as many steps as elsewhere.",
        "whole training": "all steps of all ranks; a target not reached in this time is not reached. Where ranks need "
        "not wait, rank 0 may have ended its own steps long before.",
    }


def cells(entry: Entry) -> list[str]:
    """An entry's line of the table, in the order of HEADS."""
    reached = math.isfinite(entry.target.middle)
    return [
        entry.name,
        entry.rate.text(rate),
        seconds(entry.target) if reached else not_reached(entry),
        f"{entry.reached} of {len(entry.runs)}",
        percent(entry.accuracy),
        seconds(entry.whole),
    ]


def sections(results: Results) -> list[str]:
    """HTML: the plots, the table, and how it was measured."""
    job, groups = results["job"], entries(results)
    tables = [
        table(
            escape(f"{straggler_words(group[0].straggler, job).capitalize()}; target {percent(job['target'])}"),
            HEADS,
            [[row(map(escape, cells(entry))) for entry in group]],
            look="figures wide",
        )
        for group in groups
    ]
    terms = "".join(f"<dt>{escape(t)}</dt><dd>{escape(meaning)}</dd>" for t, meaning in definitions(job).items())
    return [
        *map(plot_section, plots(results)),
        section("Time to accuracy in figures", f'<p class="muted">{escape(workload(job))}</p>', *tables),
        section("How time to accuracy is measured", f"<dl>{terms}</dl>"),
    ]


def to_html(results: Results) -> str:
    """A page of its own."""
    head = f'<p class="muted">{escape(workload(results["job"]))}</p>{verdict_box(verdict(results))}'
    return page(TITLE, head, [*sections(results), environment_section(results)], plots(results))


def to_markdown(results: Results) -> str:
    """For a pull request."""
    job = results["job"]
    lines = ["## Time to accuracy", "", workload(job), "", *(f"- {sentence}" for sentence in verdict(results))]
    rules = "|".join([":--", *("--:" for _ in HEADS[1:])])
    for group in entries(results):
        words = straggler_words(group[0].straggler, job).capitalize()
        lines += ["", f"### {words}", "", f"| {' | '.join(HEADS)} |", f"|{rules}|"]
        lines += [f"| {' | '.join(cells(entry))} |" for entry in group]
    lines += ["", "### How it is measured", "", *(f"- {t}: {meaning}" for t, meaning in definitions(job).items())]
    facts = [f"| {name} | {value.replace('|', '/')} |" for name, value in environment(results)]
    lines += ["", "### Environment", "", "| what | value |", "|:--|:--|", *facts]
    return "\n".join([*lines, "", f"```console\n{results['command']}\n```"]) + "\n"
