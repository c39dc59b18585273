"""The report of a comparison: its verdict in plain sentences, for the terminal and as Markdown."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from benchmarks.page.language import known, listed, mark, say
from benchmarks.page.markdown import bullets, escape, row, table
from benchmarks.page.reasons import reason
from benchmarks.reports.compare_figures import Group, Run, cells, columns, fastest, in_step, leads, races, rate, series
from benchmarks.stats.interval import measured
from benchmarks.training.contestants import PEERS, TORCH
from common.system.mkl import CPU_TYPE

__all__ = [
    "Certified",
    "certified",
    "cluster_in_words",
    "describe",
    "environment",
    "environment_table",
    "groups",
    "holds",
    "in_words",
    "noise_in_words",
    "notes",
    "print_terminal",
    "terms",
    "to_markdown",
    "verdict",
    "workload",
]

Results = dict[str, Any]  # what lies in results.json

APART = mark("other order by design")
NOISE = mark(
    "where the file holds the values of 7 rounds or more of both: neither is ahead by 1 % and in so many rounds (all "
    "of 7 to 10) that chance would do that in at most 2 % of all cases; otherwise: their intervals overlap."
)
NEAR = mark("≈ within the bound")
ABSENT = mark("– absent")
MARKS = {
    True: mark("✓ same bits"),
    False: mark("✗ differs"),
    None: mark("– alone"),
    APART: APART,
    NEAR: NEAR,
    ABSENT: ABSENT,
}


def noise_in_words() -> str:
    """For the reports of other kinds."""
    return say("Within noise: {noise}", noise=known(NOISE))


def terms() -> dict[str, str]:
    """What the words of a comparison mean."""
    return {
        "N": say(
            "number of ranks (training processes); S is the number of parameter servers, where there are several."
        ),
        say("samples/s"): say("samples of all ranks together."),
        say("interval"): say(
            "of the median over the repetitions: where another such run's would lie in 95 % of all cases; with up to "
            "12 repetitions it is from the least to the greatest. Every other figure is a median over them."
        ),
        say("within noise"): known(NOISE),
        say("sync"): say(
            "exposed synchronisation: the time a step is blocked after the last rank's gradients are ready, optimizer "
            "update included."
        ),
        say("wait"): say("the time a step is blocked before that, for slower ranks."),
        "p50, p99": say("median and 99th percentile over the measured steps."),
        say("acc."): say("accuracy on the test split."),
        say("units"): say("decimal: 1 GB is 10⁹ bytes."),
    }


def in_words(same: bool | str | None) -> str:
    """What the certificate says of a contestant."""
    return known(MARKS[same])


class Certified(NamedTuple):
    """A contestant's line of the certificate; `same` is None where there was nobody to compare it with, APART where it
    is not meant to be, NEAR where it may differ a little, and ABSENT where a whole scheme did not take part."""

    contestant: str
    same: bool | str | None
    digest: str


def certified(results: Results) -> list[Certified]:
    """The certificate, a line for each contestant."""
    certificate = results["certificate"]
    digests: dict[str, str] = certificate["schemes"]
    group_of = {name: group for group in certificate["groups"] for name in group["contestants"]}
    apart = certificate.get("other_order", ())
    peers = {found["contestant"]: found for found in certificate.get("peers", ())}
    differing = {found["contestant"] for found in certificate["differences"]}

    def same(name: str) -> bool | str | None:
        if name in differing:  # be it from its own other ranks
            return False
        if name in apart:
            return APART
        if name in peers:
            return NEAR if peers[name]["difference"] and peers[name]["within"] else bool(peers[name]["within"])
        group = group_of.get(name)
        if group is None or len(group["contestants"]) < 2:
            return None
        return bool(digests[name] == group["sha256"])

    there = [Certified(name, same(name), digest) for name, digest in digests.items()]
    return there + [Certified(name, ABSENT, "") for name in results.get("missing", ())]


def holds(results: Results) -> bool:
    """Whether speed may be shown: the certificate passed, and none of its lines says otherwise."""
    certificate = results["certificate"]
    passed = certificate["identical"] and certificate.get("passed", True)
    return bool(passed) and all(line.same is not False for line in certified(results))


def groups(results: Results) -> list[Group]:
    """The runs by number of ranks; none if the certificate failed."""
    runs = sorted(results["runs"] if holds(results) else [], key=lambda run: int(run["nranks"]))
    return [(nranks, list(group)) for nranks, group in groupby(runs, key=lambda run: int(run["nranks"]))]


def workload(results: Results) -> str:
    """What was trained, in a sentence.

    Raises:
        ValueError: the runs train different things, so their speeds cannot stand side by side.
    """
    runs = results["runs"]
    jobs = sorted({f"{run['model']} on {run['dataset']}" for run in runs})
    if len(jobs) != 1:
        raise ValueError(f"a report compares one job, these results hold {len(jobs)}: {', '.join(jobs)}")
    told = ("model", "dataset", "optimizer", "learning_rate", "seed")
    strong = _is_strong(results)
    return say(
        "{model} on {dataset}, batch {batch_size} shared by all ranks (strong scaling), {optimizer} {learning_rate:g}, "
        "seed {seed}, {steps:,} steps of which {warmup:,} warm-up, repeated {repetitions}×"
        if strong
        else "{model} on {dataset}, batch {batch_size} a rank, {optimizer} {learning_rate:g}, seed {seed}, "
        "{steps:,} steps of which {warmup:,} warm-up, repeated {repetitions}×",
        **{key: runs[0][key] for key in told},
        batch_size=runs[0]["batch_size"] * (runs[0]["nranks"] if strong else 1),
        steps=runs[0]["steps"],
        warmup=runs[0]["warmup_steps"],
        repetitions=runs[0]["repetitions"],
    )


def environment(results: Results) -> list[tuple[str, str]]:
    """What it ran on, as names and values."""
    facts = results["environment"]
    return [
        ("CPU", say("{cpu}, {cores} cores", cpu=facts["cpu"], cores=facts["cores"])),
        *([(CPU_TYPE, str(facts["mkl_cpu_type"]))] if "mkl_cpu_type" in facts else []),
        (say("Frequency governor"), str(facts.get("governor") or say("unknown"))),
        (say("Memory"), f"{facts['memory_bytes'] / 1e9:.1f} GB"),
        (
            say("Memory copy"),
            say("{rate:.1f} GB/s, noise {noise:.1%}", rate=facts["memcpy_gb_per_s"], noise=facts["noise"]),
        ),
        (say("Kernel"), str(facts["kernel"])),
        ("Python", str(facts["python"])),
        *((name, str(version)) for name, version in facts["versions"].items()),
        (say("Commit"), str(facts["commit"] or say("unknown"))),
        (say("Measured"), f"{results['created'][:16].replace('T', ' ')} UTC"),
    ]


def environment_table(results: Results) -> str:
    """The same in Markdown."""
    return table((say("what"), say("value")), [row(fact) for fact in environment(results)])


def verdict(results: Results) -> list[str]:
    """The outcome in plain sentences: the bits first, then who is fastest, then how it scales."""
    if not holds(results):
        return _failed(results)
    certificate = results["certificate"]
    compared = [group for group in certificate["groups"] if len(group["contestants"]) > 1]
    sizes = [say("{count} at N={nranks}", count=len(g["contestants"]), nranks=g["nranks"]) for g in compared]
    cut = [say("Interrupted: only a part of what was asked for was measured.")] if results.get("interrupted") else []
    bits = (
        say(
            "The bits are the same: after {steps} steps, contestants with the same number of ranks hold identical "
            "parameters ({sizes}).",
            steps=certificate["steps"],
            sizes=say(", ").join(sizes),
        )
        if compared
        else say("No two of ours have the same number of ranks, so there were no bits to compare.")
    )
    if peers := _peers(results):
        bits += say(
            " {peers} come within the bound of them." if len(peers) > 1 else " {peers} comes within the bound of them.",
            peers=listed([PEERS[scheme] for scheme in peers]),
        )
    measured = groups(results)
    if not measured:
        return [bits, say("No speed was measured.")]
    racing = [(nranks, [run for run in runs if races(run)]) for nranks, runs in measured]
    several = [(nranks, runs) for nranks, runs in racing if nranks > 1 and runs]
    alone = [run for nranks, runs in measured for run in runs if nranks == 1 and run["scheme"] == "local"]
    scaling = [_scaling(group, alone[0], results) for group in several if alone]
    apart = [(nranks, [run for run in runs if not in_step(run)]) for nranks, runs in measured]
    return [
        bits,
        *cut,
        *(_race(group) for group in several),
        *scaling,
        *_in_torch(measured),
        *(_apart(group) for group in apart if group[1]),
    ]


def _in_torch(measured: list[Group]) -> list[str]:
    """PyTorch's own kernels compute, so its speed says little of how it synchronises."""
    found = {nranks: run for nranks, runs in measured for run in runs if run["scheme"] == TORCH}
    speeds = [say("{rate} at N={nranks}", rate=rate(run["samples_per_s"]), nranks=n) for n, run in found.items()]
    if not speeds:
        return []
    return [
        say(
            "{name} computes with PyTorch's kernels and so takes no part in the race; samples/s: {speeds}.",
            name=TORCH,
            speeds=say(", ").join(speeds),
        )
    ]


def _apart(group: Group) -> str:
    """Those who compute something else."""
    nranks, runs = group
    speeds = [f"{series(run)} {say('{rate} samples/s', rate=rate(run['samples_per_s']))}" for run in runs]
    return say(
        "N={nranks}, in another order by design and so not the same computation: {speeds}.",
        nranks=nranks,
        speeds=say("; ").join(speeds),
    )


def _failed(results: Results) -> list[str]:
    certificate = results["certificate"]
    wrong = [line.contestant for line in certified(results) if line.same is False]
    outcome = (
        say("The bits are the same, but too far from those of one process on the whole batch.")
        if certificate["identical"] and not wrong
        else say(
            "The bits are NOT the same: after {steps} steps the parameters of {names} differ."
            if wrong
            else "The bits are NOT the same: after {steps} steps the parameters of some contestant differ.",
            steps=certificate["steps"],
            names=listed(wrong) if wrong else "",
        )
    )
    return [
        outcome + say(" Schemes that compute the wrong thing have no speed worth comparing, so none is shown."),
        *(say("First difference: {what}.", what=describe(found)) for found in certificate["differences"][:1]),
    ]


def describe(difference: dict[str, Any]) -> str:
    """One difference that the certificate found; where it lies may be unknown."""
    told = say("{one} against {other}", one=difference["contestant"], other=_reference(difference["reference"]))
    if difference["bucket"] is not None:
        told += say(", bucket {bucket}", bucket=difference["bucket"])
    if difference["parameter"] is not None:
        told += say(", parameter {parameter}", parameter=difference["parameter"])
    if difference["max_abs"] is not None:
        told += say(", by up to {size:.3g}", size=difference["max_abs"])
    return told


def _reference(text: str) -> str:
    """Another contestant, or, as the certificate has it, "its own rank 0 (rank 1 differs)"."""
    own = re.fullmatch(r"its own rank 0 \(rank (\d+) differs\)", text)
    return say("its own rank 0 (rank {rank} differs)", rank=own[1]) if own else text


def _race(group: Group) -> str:
    """Who is fastest, and by how much over the best contestant of another scheme."""
    nranks, runs = group
    first = fastest(runs)
    winner = {"nranks": nranks, "name": series(first), "rate": rate(first["samples_per_s"])}
    rivals = [run for run in runs if run["scheme"] != first["scheme"]]
    if not rivals:
        return say("N={nranks}: {name} ({rate} samples/s) is the fastest; no other scheme was measured.", **winner)
    second = fastest(rivals)
    rival = {"rival": series(second), "rival_rate": rate(second["samples_per_s"])}
    if _tied(first, second):
        return say(
            "N={nranks}: {name} ({rate} samples/s) and {rival} ({rival_rate}) are within noise of each other.",
            **winner,
            **rival,
        )
    tied = [series(run) for run in runs if run is not first and _tied(first, run)]
    once = min(first["repetitions"], second["repetitions"]) < 2
    return say(
        "N={nranks}: {name} ({rate} samples/s) is the fastest{also}, {lead:.1%} ahead of {rival} ({rival_rate}){once}.",
        **winner,
        **rival,
        also=say(", within noise of {names}", names=listed(tied)) if tied else "",
        lead=first["samples_per_s"] / second["samples_per_s"] - 1,
        once=say("; its noise is unknown") if once else "",
    )


def _tied(one: Run, other: Run) -> bool:
    return not measured(one, "samples_per_s").against(measured(other, "samples_per_s"))


def _peers(results: Results) -> list[str]:
    """The schemes of other libraries that the certificate compared with ours."""
    return list(dict.fromkeys(found["contestant"].split()[0] for found in results["certificate"].get("peers", ())))


def _is_strong(results: Results) -> bool:
    """Whether all ranks share one batch; earlier results don't say, and were weak."""
    return bool(results.get("scaling") == "strong")


def _scaling(group: Group, alone: Run, results: Results) -> str:
    """The fastest of N ranks against one process alone, both in Paddle: PyTorch has kernels of its own."""
    nranks, runs = group
    cores = results["environment"]["cores"]
    best = fastest(runs)
    speedup = best["samples_per_s"] / alone["samples_per_s"]
    return say(
        "N={nranks}: {name} makes a step of the same batch {speedup:.2f} times as fast as one process, {share:.0%} of "
        "linear speed-up{crowded}."
        if _is_strong(results)
        else "N={nranks}: {name} reaches {speedup:.2f} times the throughput of one process, {share:.0%} of linear "
        "scaling{crowded}.",
        nranks=nranks,
        name=series(best),
        speedup=speedup,
        share=speedup / nranks,
        crowded=say("; {nranks} ranks share {cores} cores", nranks=nranks, cores=cores) if nranks > cores else "",
    )


def notes(results: Results) -> list[str]:
    """What stands below the tables: how far N ranks are from one process, and who is absent."""
    checks = [(group["nranks"], group["whole_batch"]) for group in results["certificate"]["groups"]]
    whole_batch = [
        _distance(say("N={nranks} against one process on the whole batch", nranks=nranks), check)
        for nranks, check in checks
        if check is not None
    ]
    peers = [
        _distance(say("{one} against {other}", one=found["contestant"], other=found["reference"]), found)
        for found in results["certificate"].get("peers", ())
    ]
    if peers and groups(results):
        schemes = _peers(results)
        peers.append(
            say(
                "{peers} exchange gradients inside backward; their sync is the optimizer's update alone."
                if len(schemes) > 1
                else "{peers} exchanges gradients inside backward; its sync is the optimizer's update alone.",
                peers=listed(schemes),
            )
        )
    return [
        *whole_batch,
        *peers,
        *_network(results),
        *(say("{name} is absent: {why}.", name=name, why=reason(why)) for name, why in results["missing"].items()),
    ]


def _distance(who: str, check: dict[str, Any]) -> str:
    if check["within"] and (first := check.get("first_gradient")):
        return say(
            "{who}: relative difference {difference:.1e}, beyond the bound of {bound:.0e}, but of the first gradients "
            "{first:.1e}, within theirs of {near:.0e}: this training multiplies rounding.",
            who=who,
            difference=check["difference"],
            bound=check["bound"],
            first=first["difference"],
            near=first["bound"],
        )
    return say(
        "{who}: relative difference {difference:.1e}, within the bound of {bound:.0e}."
        if check["within"]
        else "{who}: relative difference {difference:.1e}, BEYOND the bound of {bound:.0e}.",
        who=who,
        difference=check["difference"],
        bound=check["bound"],
    )


def cluster_in_words(cluster: dict[str, Any]) -> str:
    """Emulated hosts, as in "4 hosts, 1gbit, 0.5ms late, host 2 3x slower"."""
    hosts, link, *more = cluster["words"].split(", ")
    told = say("{hosts} hosts, {link}", hosts=hosts.partition(" ")[0], link=link)
    for words in map(str.split, more):
        if words[0] == "host":
            told += say(", host {host} {factor} slower", host=words[1], factor=words[2])
        elif words[-1] == "each":
            told += say(", cores of each: {count}", count=words[0])
        else:
            told += say(", {delay} late", delay=words[0])
    return told


def _network(results: Results) -> list[str]:
    """Between emulated hosts: what the link carries, and how near to its limit each contestant is."""
    if not (cluster := results.get("cluster")):
        return []
    rate, nominal = cluster["stream_bytes_per_s"], min(cluster["links_bytes_per_s"])
    lines = [
        say(
            "Emulated: {cluster}. A plain TCP stream reaches {rate:,.0f} Mbit/s, {share:.0%} of the slowest link; from "
            "that, the least time for the bytes that a step moves:",
            cluster=cluster_in_words(cluster),
            rate=8e-6 * rate,
            share=rate / nominal,
        )
    ]
    for run in results["runs"]:  # most of geo's steps exchange nothing, and what the peers do hides inside backward
        if not run.get("mode", "").startswith("geo") and run["scheme"] not in PEERS and (least := run["least_sync_ms"]):
            blocked = run["wait_ms"]["p50"] + run["sync_ms"]["p50"]
            share = f"{least / blocked:.0%}" if blocked > least else say("the rest is hidden behind backward")
            lines.append(
                say(
                    "{name}: {least:.1f} ms; wait and sync {blocked:.1f} ms ({share}).",
                    name=run["contestant"],
                    least=least,
                    blocked=blocked,
                    share=share,
                )
            )
    return lines


def print_terminal(results: Results, console: Console) -> None:
    """The whole report on a terminal of 80 columns or more."""
    console.print(f"Certificate: the parameters after {results['certificate']['steps']} steps", style="bold")
    console.print(_certificate_table(results))
    if groups(results):
        console.print(Text(f"Results: {workload(results)}", style="bold"))
        wide, narrow = (_results_table(results, gap=gap) for gap in (1, 0))
        fits = Measurement.get(console, console.options.update(width=1000), wide).maximum <= console.width
        console.print(wide if fits else narrow)
        console.print(Text("* the fastest of its N", style="dim"))
    for line in notes(results):
        console.print(Text(line, style="dim"))
    console.print()
    for line in verdict(results):
        console.print(Text(line, style="bold" if holds(results) else "bold red"))


def _certificate_table(results: Results) -> Table:
    table = Table("contestant", "bits", "sha256", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    colours: dict[bool | str | None, str] = {True: "green", False: "bold red"}
    for line in certified(results):
        outcome = Text(in_words(line.same), style=colours.get(line.same, "dim"))
        table.add_row(Text(line.contestant), outcome, line.digest[:12])
    return table


def _results_table(results: Results, *, gap: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False)
    names = [cells(run)[0] for _, runs in groups(results) for run in runs]  # they break between words only
    for number, (head, detail) in enumerate(columns()):
        numeric = number > 0
        least = None if numeric else max(len(word) for words in (head, *names) for word in words.split())
        title = f"{head}\n{detail}"
        table.add_column(title, justify="right" if numeric else "left", no_wrap=numeric, min_width=least)
    for _, runs in groups(results):
        for run in runs:
            name, *figures = cells(run)
            best = leads(run, runs)
            table.add_row(Text(f"{name} *" if best else name), *figures, style="bold green" if best else "")
        table.add_section()
    return table


def to_markdown(results: Results) -> str:
    """The whole report as Markdown, for a pull request."""
    measured = groups(results)
    certificate = [row((line.contestant, in_words(line.same), line.digest[:12])) for line in certified(results)]
    parts = [
        f"## {say('GradSync comparison')}",
        bullets(verdict(results)),
        f"### {say('Certificate: the parameters after {steps} steps', steps=results['certificate']['steps'])}",
        table((say("contestant"), say("bits"), "sha256"), certificate),
        bullets(describe(found) for found in results["certificate"]["differences"]),
    ]
    if measured:
        heads = [f"{head} {detail}".strip() for head, detail in columns()]
        rows = [row(cells(run), strong=leads(run, runs)) for _, runs in measured for run in runs]
        parts += [f"### {say('Results')}", escape(workload(results)), table(heads, rows, numeric=True)]
    parts.append(bullets(notes(results)))
    if measured:
        parts += [f"### {say('How to read this')}", bullets(f"{term}: {words}" for term, words in terms().items())]
    parts += [f"### {say('Environment')}", environment_table(results)]
    parts.append(f"```console\n{results['command']}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"
