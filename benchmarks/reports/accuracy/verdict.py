"""The verdict of `accuracy` in plain sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.page.language import listed, say
from benchmarks.records.accuracy import AccuracyResults, Job
from benchmarks.reports.accuracy.entries import Entry, entries, missed, percent, seconds, straggler_words

__all__ = ["verdict"]


def verdict(results: AccuracyResults) -> list[str]:
    """Who reached the target first under each straggler, by how much, and who did not; then what a straggler costs."""
    groups = entries(results)
    return [*_bits(results), *(_race(group, results.job) for group in groups), *_costs(groups, results.job)]


def _bits(results: AccuracyResults) -> list[str]:
    certificate, seeds = results.certificate, results.job.seeds
    if not certificate.contestants:
        return []
    return [
        say(
            "Same bits: {names} end with identical parameters for each of {seeds} seeds, with and without a straggler."
            if len(seeds) > 1
            else "Same bits: {names} end with identical parameters, with and without a straggler (one seed).",
            names=listed(certificate.contestants),
            seeds=len(seeds),
        )
    ]


def _race(group: Sequence[Entry], job: Job) -> str:
    target, words = percent(job.target), straggler_words(group[0].straggler, job)
    where = say("Without a straggler") if group[0].straggler == "none" else say("With {straggler}", straggler=words)
    reached = sorted((e for e in group if math.isfinite(e.target.middle)), key=lambda entry: entry.target.middle)
    missing = [say("{name} ({why})", name=entry.name, why=missed(entry)) for entry in group if entry not in reached]
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
        missing=say("; below the target: {names}", names=listed(missing)) if missing else "",
        once=say("; the noise of one seed is unknown") if len(first.runs) < 2 and others else "",
    )


def _costs(groups: Sequence[Sequence[Entry]], job: Job) -> list[str]:
    """How much of its samples/s each contestant keeps."""
    alone = {entry.name: entry.rate.middle for group in groups for entry in group if entry.straggler == "none"}
    slowed = [group for group in groups if alone and group[0].straggler != "none"]
    return [
        say(
            "Throughput kept with {straggler}: {kept}.",
            straggler=straggler_words(group[0].straggler, job),
            kept=listed([say("{name} {share:.0%}", name=e.name, share=e.rate.middle / alone[e.name]) for e in group]),
        )
        for group in slowed
    ]
