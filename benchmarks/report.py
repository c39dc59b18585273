"""The report of a comparison: its verdict in plain sentences, for the terminal and as Markdown."""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from benchmarks.figures import COLUMNS, Group, Run, cells, fastest, in_step, leads, rate, series
from benchmarks.markdown import bullets, escape, row, table

__all__ = [
    "DEFINITIONS",
    "MARKS",
    "Certified",
    "certified",
    "describe",
    "environment",
    "groups",
    "holds",
    "notes",
    "print_terminal",
    "to_markdown",
    "verdict",
    "workload",
]

Results = dict[str, Any]  # what lies in results.json

APART = "other order by design"
NEAR = "≈ within the bound"
MARKS = {True: "✓ same bits", False: "✗ differs", None: "– alone", APART: APART, NEAR: NEAR}
DEFINITIONS = {
    "N": "number of ranks (training processes); S is the number of parameter servers, where there are several.",
    "samples/s": "samples of all ranks together.",
    "interval": "of the median over the repetitions: 95 %, by the bootstrap; with up to 6 repetitions that is from the "
    "least to the greatest. Every other figure is a median over them. Two whose intervals overlap are within noise.",
    "sync": "exposed synchronisation: the time a step is blocked after the last rank's gradients are ready, "
    "optimizer update included.",
    "wait": "the time a step is blocked before that, for slower ranks.",
    "p50, p99": "median and 99th percentile over the measured steps.",
    "acc.": "accuracy on the test split.",
    "units": "decimal: 1 GB is 10⁹ bytes.",
}


class Certified(NamedTuple):
    """A contestant's line of the certificate; `same` is None where there was nobody to compare it with, APART where it
    is not meant to be, and NEAR where it may differ a little."""

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

    return [Certified(name, same(name), digest) for name, digest in digests.items()]


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
    run = runs[0]
    return (
        f"{jobs[0]}, batch {run['batch_size']} a rank, {run['optimizer']} {run['learning_rate']:g}, "
        f"seed {run['seed']}, {run['steps']:,} steps of which {run['warmup_steps']:,} warm-up, "
        f"repeated {run['repetitions']}×"
    )


def environment(results: Results) -> list[tuple[str, str]]:
    """What it ran on, as names and values."""
    facts = results["environment"]
    return [
        ("CPU", f"{facts['cpu']}, {facts['cores']} cores"),
        ("Frequency governor", str(facts.get("governor") or "unknown")),
        ("Memory", f"{facts['memory_bytes'] / 1e9:.1f} GB"),
        ("Memory copy", f"{facts['memcpy_gb_per_s']:.1f} GB/s, noise {facts['noise']:.1%}"),
        ("Kernel", str(facts["kernel"])),
        ("Python", str(facts["python"])),
        *((name, str(version)) for name, version in facts["versions"].items()),
        ("Commit", str(facts["commit"] or "unknown")),
        ("Measured", f"{results['created'][:16].replace('T', ' ')} UTC"),
    ]


def verdict(results: Results) -> list[str]:
    """The outcome in plain sentences: the bits first, then who is fastest, then how it scales."""
    if not holds(results):
        return _failed(results)
    certificate = results["certificate"]
    compared = [group for group in certificate["groups"] if len(group["contestants"]) > 1]
    sizes = ", ".join(f"{len(group['contestants'])} at N={group['nranks']}" for group in compared)
    bits = (
        f"The bits are the same: after {certificate['steps']} steps, contestants with the same number of ranks "
        f"hold identical parameters ({sizes})."
        if compared
        else "No two of ours have the same number of ranks, so there were no bits to compare."
    )
    if certificate.get("peers"):
        bits += " paddle.DataParallel comes within the bound of them."
    measured = groups(results)
    if not measured:
        return [bits, "No speed was measured."]
    racing = [(nranks, [run for run in runs if in_step(run)]) for nranks, runs in measured]
    several = [(nranks, runs) for nranks, runs in racing if nranks > 1 and runs]
    alone = [run for nranks, runs in measured for run in runs if nranks == 1 and run["scheme"] == "local"]
    scaling = [_scaling(group, alone[0], results["environment"]["cores"]) for group in several if alone]
    apart = [(nranks, [run for run in runs if not in_step(run)]) for nranks, runs in measured]
    return [bits, *(_race(group) for group in several), *scaling, *(_apart(group) for group in apart if group[1])]


def _apart(group: Group) -> str:
    """Those who compute something else."""
    nranks, runs = group
    named = "; ".join(f"{series(run)} {rate(run['samples_per_s'])} samples/s" for run in runs)
    return f"N={nranks}, in another order by design and so not the same computation: {named}."


def _failed(results: Results) -> list[str]:
    certificate = results["certificate"]
    wrong = [line.contestant for line in certified(results) if line.same is False]
    outcome = (
        "The bits are the same, but too far from those of one process on the whole batch"
        if certificate["identical"] and not wrong
        else f"The bits are NOT the same: after {certificate['steps']} steps the parameters of "
        f"{' and '.join(wrong) or 'some contestant'} differ"
    )
    return [
        f"{outcome}. Schemes that compute the wrong thing have no speed worth comparing, so none is shown.",
        *(f"First difference: {describe(found)}." for found in certificate["differences"][:1]),
    ]


def describe(difference: dict[str, Any]) -> str:
    """One difference that the certificate found; where it lies may be unknown."""
    places = [f"{what} {difference[what]}" for what in ("bucket", "parameter") if difference[what] is not None]
    size = [] if difference["max_abs"] is None else [f"by up to {difference['max_abs']:.3g}"]
    return ", ".join([f"{difference['contestant']} against {difference['reference']}", *places, *size])


def _race(group: Group) -> str:
    """Who is fastest, and by how much over the best contestant of another scheme."""
    nranks, runs = group
    first = fastest(runs)
    name = f"N={nranks}: {series(first)} ({rate(first['samples_per_s'])} samples/s)"
    rivals = [run for run in runs if run["scheme"] != first["scheme"]]
    if not rivals:
        return f"{name} is the fastest; no other scheme was measured."
    second = fastest(rivals)
    rival = f"{series(second)} ({rate(second['samples_per_s'])})"
    if _overlap(first, second):
        return f"{name} and {rival} are within noise of each other."
    tied = [series(run) for run in runs if run is not first and _overlap(first, run)]
    also = f", within noise of {' and '.join(tied)}" if tied else ""
    once = min(first["repetitions"], second["repetitions"]) < 2
    lead = first["samples_per_s"] / second["samples_per_s"] - 1
    return f"{name} is the fastest{also}, {lead:.1%} ahead of {rival}{'; its noise is unknown' if once else ''}."


def _overlap(one: Run, other: Run) -> bool:
    (low, high), (other_low, other_high) = one["samples_per_s_interval"], other["samples_per_s_interval"]
    return bool(low <= other_high and other_low <= high)


def _scaling(group: Group, alone: Run, cores: int) -> str:
    """The fastest of N ranks against one process alone."""
    nranks, runs = group
    best = fastest(runs)
    speedup = best["samples_per_s"] / alone["samples_per_s"]
    crowded = f"; {nranks} ranks share {cores} cores" if nranks > cores else ""
    return (
        f"N={nranks}: {series(best)} reaches {speedup:.2f} times the throughput of one process, "
        f"{speedup / nranks:.0%} of linear scaling{crowded}."
    )


def notes(results: Results) -> list[str]:
    """What stands below the tables: how far N ranks are from one process, and who is absent."""
    checks = [(group["nranks"], group["whole_batch"]) for group in results["certificate"]["groups"]]
    whole_batch = [
        f"N={nranks} against one process on the whole batch: relative difference {check['difference']:.1e}, "
        f"{'within' if check['within'] else 'BEYOND'} the bound of {check['bound']:.0e}."
        for nranks, check in checks
        if check is not None
    ]
    peers = [
        f"{found['contestant']} against {found['reference']}: relative difference {found['difference']:.1e}, "
        f"{'within' if found['within'] else 'BEYOND'} the bound of {found['bound']:.0e}."
        for found in results["certificate"].get("peers", ())
    ]
    if peers and groups(results):
        peers.append("paddle exchanges gradients inside backward; its sync is the optimizer's update alone.")
    return [
        *whole_batch,
        *peers,
        *_network(results),
        *(f"{name} is absent: {why.rstrip('.')}." for name, why in results["missing"].items()),
    ]


def _network(results: Results) -> list[str]:
    """Between emulated hosts: what the link carries, and how near to its limit each contestant is."""
    if not (cluster := results.get("cluster")):
        return []
    rate, nominal = cluster["stream_bytes_per_s"], min(cluster["links_bytes_per_s"])
    stream = f"A plain TCP stream reaches {8e-6 * rate:,.0f} Mbit/s, {rate / nominal:.0%} of the slowest link"
    lines = [f"Emulated: {cluster['words']}. {stream}; from that, the least time for the bytes that a step moves:"]
    for run in results["runs"]:
        if least := run["least_sync_ms"]:
            blocked = run["wait_ms"]["p50"] + run["sync_ms"]["p50"]
            share = f"{least / blocked:.0%}" if blocked > least else "the rest is hidden behind backward"
            lines.append(f"{run['contestant']}: {least:.1f} ms; wait and sync {blocked:.1f} ms ({share}).")
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
    colours = {True: "green", False: "bold red", None: "dim", APART: "dim", NEAR: "dim"}
    for line in certified(results):
        table.add_row(Text(line.contestant), Text(MARKS[line.same], style=colours[line.same]), line.digest[:12])
    return table


def _results_table(results: Results, *, gap: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False)
    for head, detail in COLUMNS:
        numeric = head != "contestant"
        table.add_column(f"{head}\n{detail}", justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
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
    certificate = [row((line.contestant, MARKS[line.same], line.digest[:12])) for line in certified(results)]
    parts = [
        "## GradSync comparison",
        bullets(verdict(results)),
        f"### Certificate: the parameters after {results['certificate']['steps']} steps",
        table(("contestant", "bits", "sha256"), certificate),
        bullets(describe(found) for found in results["certificate"]["differences"]),
    ]
    if measured:
        heads = [f"{head} {detail}".strip() for head, detail in COLUMNS]
        rows = [row(cells(run), strong=leads(run, runs)) for _, runs in measured for run in runs]
        parts += ["### Results", escape(workload(results)), table(heads, rows, numeric=True)]
    parts.append(bullets(notes(results)))
    if measured:
        parts += ["### How to read it", bullets(f"{term}: {meaning}" for term, meaning in DEFINITIONS.items())]
    parts += ["### Environment", table(("what", "value"), [row(fact) for fact in environment(results)])]
    parts.append(f"```console\n{results['command']}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"
