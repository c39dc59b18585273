"""The verdict of a comparison in plain sentences: the bits first, then who is fastest, then how it scales."""

from __future__ import annotations

from benchmarks.contestants.table_of_trainings import RIVALS, TORCH
from benchmarks.page.language import listed, say
from benchmarks.records.compare import CompareResults, Run
from benchmarks.reports.compare.certificate import certified, compared, describe, groups, holds, rivals
from benchmarks.reports.facts import busy, too_few_rounds
from benchmarks.reports.runs import Group, fastest, in_step, races, rate, series, tied
from benchmarks.stats.interval import LEAST_ROUNDS

__all__ = ["is_strong", "verdict"]


def verdict(results: CompareResults) -> list[str]:
    """The outcome in plain sentences: the bits first, then who is fastest, then how it scales."""
    if not holds(results):
        return _failed(results)
    cut = [say("Interrupted: only a part of what was asked for was measured.")] if results.interrupted else []
    bits = [_bits(results)]
    if others := rivals(results):
        bits.append(
            say(
                "{rivals} stay within the allowed difference from them."
                if len(others) > 1
                else "{rivals} stays within the allowed difference from them.",
                rivals=listed([RIVALS[scheme] for scheme in others]),
            )
        )
    measured = groups(results)
    if not measured:
        return [*bits, say("No speed was measured.")]
    racing = [(nranks, [run for run in runs if races(run)]) for nranks, runs in measured]
    several = [(nranks, runs) for nranks, runs in racing if nranks > 1 and runs]
    alone = [run for nranks, runs in measured for run in runs if nranks == 1 and run.scheme == "local"]
    scaling = [_scaling(group, alone[0], results) for group in several if alone]
    apart = [(nranks, [run for run in runs if not in_step(run)]) for nranks, runs in measured]
    return [
        *bits,
        *cut,
        *(_race(group) for group in several),
        *too_few_rounds(min((run.repetitions for _, runs in several for run in runs), default=LEAST_ROUNDS)),
        *busy(([run.rate for run in runs] for _, runs in several), min(run.repetitions for run in results.runs)),
        *scaling,
        *_in_torch(measured),
        *(_apart(group) for group in apart if group[1]),
    ]


def _bits(results: CompareResults) -> str:
    if not compared(results):
        return say("No two of ours have the same N, so there are no bits to compare.")
    return say(
        "Same bits: after {steps} steps, all contestants with the same N hold identical parameters.",
        steps=results.certificate.steps,
    )


def _in_torch(measured: list[Group]) -> list[str]:
    """PyTorch's own kernels compute, so its speed says little of how it synchronises."""
    found = {nranks: run for nranks, runs in measured for run in runs if run.scheme == TORCH}
    speeds = [say("{rate} at N={nranks}", rate=rate(run.samples_per_s), nranks=n) for n, run in found.items()]
    if not speeds:
        return []
    return [
        say(
            "{name} is not ranked, because it computes with PyTorch's kernels. Samples/s: {speeds}.",
            name=TORCH,
            speeds=say(", ").join(speeds),
        )
    ]


def _apart(group: Group) -> str:
    """Those who compute something else."""
    nranks, runs = group
    speeds = [f"{series(run)} {say('{rate} samples/s', rate=rate(run.samples_per_s))}" for run in runs]
    return say(
        "N={nranks}, not ranked, because these modes update in another order by design: {speeds}.",
        nranks=nranks,
        speeds=say("; ").join(speeds),
    )


def _failed(results: CompareResults) -> list[str]:
    certificate = results.certificate
    wrong = [line.contestant for line in certified(results) if line.same is False]
    outcome = (
        say("The bits are the same, but too far from one process on the whole batch.")
        if certificate.identical and not wrong
        else say(
            "The bits are NOT the same: after {steps} steps the parameters of {names} differ."
            if wrong
            else "The bits are NOT the same: after {steps} steps the parameters of some contestant differ.",
            steps=certificate.steps,
            names=listed(wrong) if wrong else "",
        )
    )
    return [
        outcome + say(" No speed is shown: a wrong result has none worth comparing."),
        *(say("First difference: {what}.", what=describe(found)) for found in certificate.differences[:1]),
    ]


def _race(group: Group) -> str:
    """Who is fastest, and by how much over the best contestant of another scheme."""
    nranks, runs = group
    first = fastest(runs)
    winner = {"nranks": nranks, "name": series(first), "rate": rate(first.samples_per_s)}
    rivals = [run for run in runs if run.scheme != first.scheme]
    few = min(run.repetitions for run in runs) < LEAST_ROUNDS
    if not rivals:
        return say(
            "N={nranks}: {name} has the highest median, {rate} samples/s; no other scheme was measured."
            if few
            else "N={nranks}: {name} ({rate} samples/s) is the fastest; no other scheme was measured.",
            **winner,
        )
    second = fastest(rivals)
    rival = {"rival": series(second), "rival_rate": rate(second.samples_per_s)}
    if few:
        return say(
            "N={nranks}: {name} has the highest median, {rate} samples/s; {rival} has {rival_rate}.", **winner, **rival
        )
    if tied(first, second):
        return say(
            "N={nranks}: {name} ({rate} samples/s) and {rival} ({rival_rate}) are within noise of each other: take "
            "either.",
            **winner,
            **rival,
        )
    near = [series(run) for run in runs if run is not first and tied(first, run)]
    return say(
        "N={nranks}: {name} ({rate} samples/s) is the fastest{also}, {lead:.1%} ahead of {rival} ({rival_rate}).",
        **winner,
        **rival,
        also=say(", within noise of {names}", names=listed(near)) if near else "",
        lead=first.samples_per_s / second.samples_per_s - 1,
    )


def is_strong(results: CompareResults) -> bool:
    """Whether all ranks share one batch."""
    return results.scaling == "strong"


def _scaling(group: Group, alone: Run, results: CompareResults) -> str:
    """The fastest of N ranks against one process alone, both in Paddle: PyTorch has kernels of its own. The interval
    goes from its least over the other's greatest to its greatest over the other's least."""
    nranks, runs = group
    cores = results.environment.cores
    best = fastest(runs)
    speedup, mine, its = best.samples_per_s / alone.samples_per_s, best.rate, alone.rate
    once = min(best.repetitions, alone.repetitions) < 2
    low, high = mine.low / its.high, mine.high / its.low
    return say(
        "N={nranks}: {name} steps through the same batch {speedup:.2f} times as fast as one process{between}, "
        "{share:.0%} of linear speed-up{crowded}{once}."
        if is_strong(results)
        else "N={nranks}: {name} reaches {speedup:.2f} times the throughput of one process{between}, {share:.0%} of "
        "linear scaling{crowded}{once}.",
        nranks=nranks,
        name=series(best),
        speedup=speedup,
        between="" if once else say(" ({low:.2f}–{high:.2f})", low=low, high=high),
        share=speedup / nranks,
        crowded=say("; {nranks} ranks share {cores} cores", nranks=nranks, cores=cores) if nranks > cores else "",
        once=say("; its noise is unknown")
        if once
        else say("; within noise of one process")
        if low <= 1 <= high
        else "",
    )
