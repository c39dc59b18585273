"""The report of `accuracy` (accuracy.json): who reached the target first, the curves, and how it was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.page.document import Definitions, Report, Row, Section, Table
from benchmarks.page.language import say
from benchmarks.records.accuracy import AccuracyResults, Job
from benchmarks.reports.accuracy.entries import Entry, entries, not_reached, percent, seconds, straggler_words
from benchmarks.reports.accuracy.plots import plots
from benchmarks.reports.accuracy.verdict import verdict
from benchmarks.reports.facts import environment
from benchmarks.reports.runs import rate

__all__ = ["report"]


def report(results: AccuracyResults) -> Report:
    job = results.job
    target = say("; target {target}", target=percent(job.target))
    tables = [
        Table(f"{_heading(group, job)}{target}", heads(), [[Row(cells(e)) for e in group]], figures=True, wide=True)
        for group in entries(results)
    ]
    return Report(
        say("GradSync: time to accuracy"),
        verdict(results),
        [
            *map(Section.of, plots(results)),
            Section(say("Time to accuracy in figures"), tables),
            Section(say("How time to accuracy is measured"), [Definitions(definitions(job))]),
        ],
        [environment(results)],
        about=workload(job),
    )


def workload(job: Job) -> str:
    """What was trained, in a sentence."""
    told = ("model", "dataset", "nranks", "batch_size", "optimizer", "lr", "steps", "eval_every")
    return say(
        "{model} on {dataset}, N={nranks}, batch {batch_size} per rank, {optimizer} {lr:g}, {steps:,} steps, "
        "evaluated every {eval_every}, seeds {seeds}",
        **{key: getattr(job, key) for key in told},
        seeds=say(", ").join(map(str, job.seeds)),
    )


def definitions(job: Job) -> dict[str, str]:
    """What the words mean."""
    return {
        say("time to target"): say(
            "seconds from the start of the first step until rank 0's parameters first reach a test accuracy of "
            "{target}. Rank 0 keeps a copy of its parameters every {every} steps and at the end. The copies are "
            "evaluated on the whole test split after training, so evaluation takes no time from it. The time is "
            "known to within {every} steps of rank 0.",
            target=percent(job.target),
            every=job.eval_every,
        ),
        say("straggler"): say(
            "a rank whose gradients are ready {factor:g} times as late: it sleeps {more:g} times as long as it "
            "computes. It is either rank {rank} in every step, or a random rank in each step (the same draws for "
            "all contestants). While it sleeps, others can use its core.",
            more=job.factor - 1,
            factor=job.factor,
            rank=job.nranks - 1,
        ),
        say("samples/s"): say("the sum of every rank's rate, from its first step to its last without the first few."),
        say("(min–max)"): say(
            "the range over seeds; all other figures are medians over seeds. Where two ranges overlap, the "
            "difference is within noise. A seed changes the initial parameters and the random straggler, not the "
            "order of the data."
        ),
        say("budget"): say(
            "{steps:,} steps of every rank. Where ranks do not wait for a straggler (async, geo), rank 0 "
            "continues until all ranks together have made about as many steps.",
            steps=job.steps,
        ),
        say("whole training"): say(
            "all steps of all ranks. Where ranks do not wait for each other, rank 0 may finish its own steps long"
            " before that."
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


def _heading(group: Sequence[Entry], job: Job) -> str:
    words = straggler_words(group[0].straggler, job)
    return words[:1].upper() + words[1:]
