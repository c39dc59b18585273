"""What `accuracy` found: in plain sentences, as Markdown, and as sections and plots of a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from benchmarks.page.html_page import page, plot_section, row, section, table, verdict_box
from benchmarks.page.language import listed, say
from benchmarks.reports.accuracy_figures import Entry, entries, not_reached, percent, plots, seconds, straggler_words
from benchmarks.reports.compare import environment_table
from benchmarks.reports.compare_figures import rate
from benchmarks.reports.compare_page import environment_section

__all__ = ["plots", "sections", "to_html", "to_markdown", "verdict"]

Results = dict[str, Any]  # what lies in accuracy.json


def verdict(results: Results) -> list[str]:
    """Who reached the target first under each straggler, by how much, and who did not; then what a straggler costs."""
    groups = entries(results)
    return [*_bits(results), *(_race(group, results["job"]) for group in groups), *_costs(groups, results["job"])]


def _bits(results: Results) -> list[str]:
    certificate, seeds = results["certificate"], results["job"]["seeds"]
    if not certificate["contestants"]:
        return []
    return [
        say(
            "{names} ended in the same parameters, bit for bit, with each of {seeds} seeds, whoever straggled."
            if len(seeds) > 1
            else "{names} ended in the same parameters, bit for bit, with the one seed, whoever straggled.",
            names=listed(certificate["contestants"]),
            seeds=len(seeds),
        )
    ]


def _race(group: Sequence[Entry], job: dict[str, Any]) -> str:
    target, words = percent(job["target"]), straggler_words(group[0].straggler, job)
    where = say("Without a straggler") if group[0].straggler == "none" else say("With {straggler}", straggler=words)
    reached = sorted((e for e in group if math.isfinite(e.target.middle)), key=lambda entry: entry.target.middle)
    missing = [say("{name} ({why})", name=entry.name, why=_missed(entry)) for entry in group if entry not in reached]
    if not reached:
        return say("{where}, nobody reaches {target}: {names}.", where=where, target=target, names=listed(missing))
    first, *others = reached
    tied = [entry.name for entry in others if entry.target.overlaps(first.target)]
    later = [
        say("{name} takes {times:.2f} times as long", name=entry.name, times=entry.target.middle / first.target.middle)
        for entry in others
        if entry.name not in tied
    ]
    return say(
        "{where}, {name} reaches {target} first, after {time}{noise}{later}{missing}{once}.",
        where=where,
        name=first.name,
        target=target,
        time=seconds(first.target),
        noise=say(", within noise of {names}", names=listed(tied)) if tied else "",
        later=say("; {later}", later=listed(later)) if later else "",
        missing=say("; below the target stay {names}", names=listed(missing)) if missing else "",
        once=say("; the noise of one seed is unknown") if len(first.runs) < 2 and others else "",
    )


def _missed(entry: Entry) -> str:
    if not entry.reached:
        return not_reached(entry)
    return say(
        "{not_reached} by {missed} of {seeds} seeds",
        not_reached=not_reached(entry),
        missed=len(entry.runs) - entry.reached,
        seeds=len(entry.runs),
    )


def _costs(groups: Sequence[Sequence[Entry]], job: dict[str, Any]) -> list[str]:
    """How much of its samples/s each contestant keeps."""
    alone = {entry.name: entry.rate.middle for group in groups for entry in group if entry.straggler == "none"}
    slowed = [group for group in groups if alone and group[0].straggler != "none"]
    return [
        say(
            "Of its samples/s, with {straggler}, {kept}.",
            straggler=straggler_words(group[0].straggler, job),
            kept=listed(
                [say("{name} keeps {share:.0%}", name=e.name, share=e.rate.middle / alone[e.name]) for e in group]
            ),
        )
        for group in slowed
    ]


def workload(job: dict[str, Any]) -> str:
    """What was trained, in a sentence."""
    told = ("model", "dataset", "nranks", "batch_size", "optimizer", "lr", "steps", "eval_every")
    return say(
        "{model} on {dataset}, N={nranks}, batch {batch_size} a rank, {optimizer} {lr:g}, {steps:,} steps, evaluated "
        "every {eval_every}, seeds {seeds}",
        **{key: job[key] for key in told},
        seeds=say(", ").join(map(str, job["seeds"])),
    )


def definitions(job: dict[str, Any]) -> dict[str, str]:
    """What the words mean."""
    return {
        say("time to target"): say(
            "seconds from the start of the first step until rank 0's parameters first have a test accuracy of {target} "
            "or more. Rank 0 keeps a copy of its parameters every {every} steps (and after the last one, when all "
            "ranks have settled on the same); all copies are evaluated on the whole test split after the training, so "
            "evaluation takes no time from it. The time is known to within {every} steps of rank 0.",
            target=percent(job["target"]),
            every=job["eval_every"],
        ),
        say("straggler"): say(
            "a rank that sleeps {more:g} times as long as it has computed before its gradients are ready, so that they "
            "are {factor:g} times as late. Either rank {rank} in every step, or one rank drawn anew for each step, the "
            "same draws for all contestants. Sleeping leaves its core to others.",
            more=job["factor"] - 1,
            factor=job["factor"],
            rank=job["nranks"] - 1,
        ),
        say("samples/s"): say("every rank's own rate from its first step to its last, the first few left out; summed."),
        say("(min–max)"): say(
            "over seeds, while every other figure is a median over them. Where these bands overlap, a difference is "
            "within noise. A seed changes the initial parameters and the straggler's draws; the order of the data is "
            "the same."
        ),
        say("budget"): say(
            "{steps:,} steps of every rank. Where nobody waits for a straggler (async, geo), rank 0 goes on until all "
            "ranks together have made about as many steps as elsewhere.",
            steps=job["steps"],
        ),
        say("whole training"): say(
            "all steps of all ranks; a target not reached in this time is not reached. Where ranks need not wait, rank "
            "0 may have ended its own steps long before."
        ),
    }


def heads() -> list[str]:
    """Of the table."""
    figures = [say("samples/s"), say("time to target"), say("seeds"), say("accuracy"), say("whole training")]
    return [say("contestant"), *figures]


def cells(entry: Entry) -> list[str]:
    """An entry's line of the table, in the order of `heads`."""
    reached = math.isfinite(entry.target.middle)
    return [
        entry.name,
        entry.rate.text(rate),
        seconds(entry.target) if reached else not_reached(entry),
        say("{reached} of {seeds}", reached=entry.reached, seeds=len(entry.runs)),
        percent(entry.accuracy),
        seconds(entry.whole),
    ]


def sections(results: Results) -> list[str]:
    """HTML: the plots, the table, and how it was measured."""
    job, groups = results["job"], entries(results)
    tables = [
        table(
            escape(f"{_heading(group, job)}{say('; target {target}', target=percent(job['target']))}"),
            heads(),
            [[row(map(escape, cells(entry))) for entry in group]],
            look="figures wide",
        )
        for group in groups
    ]
    terms = "".join(f"<dt>{escape(t)}</dt><dd>{escape(meaning)}</dd>" for t, meaning in definitions(job).items())
    return [
        *map(plot_section, plots(results)),
        section(say("Time to accuracy in figures"), f'<p class="muted">{escape(workload(job))}</p>', *tables),
        section(say("How time to accuracy is measured"), f"<dl>{terms}</dl>"),
    ]


def _heading(group: Sequence[Entry], job: dict[str, Any]) -> str:
    words = straggler_words(group[0].straggler, job)
    return words[:1].upper() + words[1:]


def to_html(results: Results) -> str:
    """A page of its own."""
    head = f'<p class="muted">{escape(workload(results["job"]))}</p>{verdict_box(verdict(results))}'
    title = say("GradSync: time to accuracy")
    return page(title, head, [*sections(results), environment_section(results)], plots(results))


def to_markdown(results: Results) -> str:
    """For a pull request."""
    job = results["job"]
    title = f"## {say('Time to accuracy')}"
    lines = [title, "", workload(job), "", *(f"- {sentence}" for sentence in verdict(results))]
    rules = "|".join([":--", *("--:" for _ in heads()[1:])])
    for group in entries(results):
        lines += ["", f"### {_heading(group, job)}", "", f"| {' | '.join(heads())} |", f"|{rules}|"]
        lines += [f"| {' | '.join(cells(entry))} |" for entry in group]
    measured = f"### {say('How time to accuracy is measured')}"
    lines += ["", measured, "", *(f"- {term}: {meaning}" for term, meaning in definitions(job).items())]
    lines += ["", f"### {say('Environment')}", "", environment_table(results)]
    return "\n".join([*lines, "", f"```console\n{results['command']}\n```"]) + "\n"
