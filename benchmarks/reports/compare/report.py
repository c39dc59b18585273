"""The report of a comparison (results.json): the verdict, its picture, the certificate, and the figures."""

from __future__ import annotations

from benchmarks.contestants.table_of_trainings import RIVALS
from benchmarks.page.document import Block, Bullets, Cell, Definitions, Fold, Paragraph, Report, Row, Section, Table
from benchmarks.page.language import known, listed, say
from benchmarks.page.reasons import reason
from benchmarks.records.compare import CompareResults, Run
from benchmarks.reports.compare.certificate import (
    certified,
    compared,
    describe,
    groups,
    holds,
    in_words,
    remarks,
    rivals,
)
from benchmarks.reports.compare.plots import plots
from benchmarks.reports.compare.verdict import is_strong, verdict
from benchmarks.reports.facts import NOISE, cluster_in_words, environment
from benchmarks.reports.runs import milliseconds, rate, series, winner
from benchmarks.stats.interval import in_words as interval_in_words

__all__ = ["cells", "columns", "how_to_read", "notes", "report", "terms", "workload"]


def report(results: CompareResults) -> Report:
    speeds = bool(groups(results))
    return Report(
        say("GradSync: parameter server against ring all-reduce"),
        verdict(results),
        _with_speeds(results) if speeds else _without_speeds(results),
        [*([how_to_read()] if speeds else []), environment(results)],
        about=workload(results) if speeds else "",
        failed=not holds(results),
    )


def _with_speeds(results: CompareResults) -> list[Section]:
    throughput, *others = plots(groups(results))
    return [
        Section.of(throughput),
        Section("", [_folded(results)]),
        _speeds(results),
        *map(Section.of, others),
    ]


def _without_speeds(results: CompareResults) -> list[Section]:
    return [Section(say("Certificate"), [*_certificate(results), Bullets(_below(results))])]


def _folded(results: CompareResults) -> Fold:
    steps, sizes = results.certificate.steps, compared(results)
    words = (
        say("Certificate: the same bits after {steps} steps ({sizes})", steps=steps, sizes=sizes)
        if sizes
        else say("Certificate: nothing to compare")
    )
    return Fold(f"✓ {words}" if sizes else words, _certificate(results), "good" if sizes else "")


def _certificate(results: CompareResults) -> list[Block]:
    certificate = results.certificate
    looks: dict[bool | str | None, str] = {True: "good", False: "bad"}
    lines = [
        Row((name, Cell(in_words(same), looks.get(same, "muted")), Cell(digest[:12], "code")))
        for name, same, digest in certified(results)
    ]
    about = say(
        "Before anything is timed, all contestants train the same model from the same start. At the same N they "
        "must end with the same parameters, bit for bit."
    )
    caption = say("Parameters after {steps} steps", steps=certificate.steps)
    return [
        Paragraph(about),
        Table(caption, (say("contestant"), say("bits"), "sha256"), [lines]),
        Bullets([*map(describe, certificate.differences), *remarks(results)]),
    ]


def _speeds(results: CompareResults) -> Section:
    bodies = [[Row(cells(run), strong=run is winner(runs)) for run in runs] for _, runs in groups(results)]
    marked = any(row.strong for rows in bodies for row in rows)
    caption = say("Medians. Bold: the fastest of its N") if marked else say("Medians")
    figures = Table(caption, columns(), bodies, figures=True, wide=True)
    return Section(say("Results"), [figures, Bullets(_below(results))])


def how_to_read() -> Section:
    """What the words of a comparison mean."""
    return Section(say("How to read this"), [Definitions(terms())])


def terms() -> dict[str, str]:
    """What the words of a comparison mean."""
    return {
        "N": say("number of ranks (training processes). S is the number of parameter servers, if there are several."),
        say("samples/s"): say("samples of all ranks together."),
        say("interval"): say(
            "exact, distribution-free 95 % interval for the median of a repeated run. Up to 12 repetitions, it is"
            " the min-max range. All other figures are medians over repetitions."
        ),
        say("within noise"): known(NOISE),
        say("sync"): say(
            "exposed communication: the time a step is blocked after the last rank's gradients are ready, "
            "optimizer update included."
        ),
        say("wait"): say("the time a step is blocked before that, waiting for slower ranks."),
        "p50, p99": say("median and 99th percentile over the measured steps."),
        say("acc."): say("accuracy on the test split."),
        say("units"): say("decimal: 1 GB is 10⁹ bytes."),
    }


def workload(results: CompareResults) -> str:
    """What was trained, in a sentence.

    Raises:
        ValueError: the runs train different things, so their speeds cannot stand side by side.
    """
    runs = results.runs
    jobs = sorted({f"{run.model} on {run.dataset}" for run in runs})
    if len(jobs) != 1:
        raise ValueError(f"a report compares one job, these results hold {len(jobs)}: {', '.join(jobs)}")
    told = ("model", "dataset", "optimizer", "learning_rate", "seed")
    strong, count = is_strong(results), runs[0].repetitions
    return say(
        "{model} on {dataset}, batch {batch_size} shared by all ranks (strong scaling), {optimizer} "
        "{learning_rate:g}, seed {seed}, {steps:,} steps (first {warmup:,} not timed), {repeated}"
        if strong
        else "{model} on {dataset}, batch {batch_size} per rank, {optimizer} {learning_rate:g}, seed {seed}, "
        "{steps:,} steps (first {warmup:,} not timed), {repeated}",
        **{key: getattr(runs[0], key) for key in told},
        batch_size=runs[0].batch_size * (runs[0].nranks if strong else 1),
        steps=runs[0].steps,
        warmup=runs[0].warmup_steps,
        repeated=say("{count} repetitions" if count != 1 else "{count} repetition", count=count),
    )


def columns() -> list[str]:
    """The heads of the results table."""
    return [
        say("contestant"),
        "N",
        f"{say('samples/s')}\n{say('interval')}",
        f"{say('step ms')}\np50/p99",
        f"{say('sync ms')}\np50/p99",
        f"{say('wait ms')}\np50",
        f"{say('loss')}\n{say('first→last')}",
        f"{say('acc.')}\n%",
    ]


def cells(run: Run) -> list[str]:
    """A run's line in the results table, in the order of `columns`."""
    step, sync = run.step_ms, run.sync_ms
    return [
        series(run),
        str(run.nranks),
        f"{rate(run.samples_per_s)} ({interval_in_words(run.samples_per_s_interval, rate)})",
        f"{milliseconds(step.p50)}/{milliseconds(step.p99)}",
        f"{milliseconds(sync.p50)}/{milliseconds(sync.p99)}",
        milliseconds(run.wait_ms.p50),
        f"{run.loss.first:#.3g}→{run.loss.last:#.3g}",
        "–" if run.accuracy is None else f"{100 * run.accuracy:.1f}",
    ]


def notes(results: CompareResults) -> list[str]:
    """What stands below the tables on a terminal."""
    return [*remarks(results), *_below(results)]


def _below(results: CompareResults) -> list[str]:
    """What stands below the results: what a rival's sync is, how near the network's limit is, and who is absent."""
    others = rivals(results) if groups(results) else []
    sync_of_rivals = say(
        "{rivals} exchange gradients inside backward, so their sync is the optimizer's update alone."
        if len(others) > 1
        else "{rivals} exchanges gradients inside backward, so its sync is the optimizer's update alone.",
        rivals=listed(others or [""]),
    )
    absent = [say("{name} is absent: {why}.", name=name, why=reason(why)) for name, why in results.missing.items()]
    return [*([sync_of_rivals] if others else []), *_network(results), *absent]


def _network(results: CompareResults) -> list[str]:
    """Between emulated hosts: what the link carries, and how near to its limit each contestant is."""
    if not (cluster := results.cluster) or not (rate := cluster.stream_bytes_per_s):
        return []
    lines = [
        say(
            "Emulated: {cluster}. A plain TCP stream reaches {rate:,.0f} Mbit/s, {share:.0%} of the slowest link."
            " At that speed, the bytes of a step take at least:",
            cluster=cluster_in_words(cluster),
            rate=8e-6 * rate,
            share=rate / min(cluster.links_bytes_per_s),
        )
    ]
    for run in results.runs:  # most of geo's steps exchange nothing, and what rivals do hides inside backward
        if not run.mode.startswith("geo") and run.scheme not in RIVALS and (least := run.least_sync_ms):
            blocked = run.wait_ms.p50 + run.sync_ms.p50
            share = f"{least / blocked:.0%}" if blocked > least else say("the rest is hidden behind backward")
            lines.append(
                say(
                    "{name}: {least:.1f} ms; wait and sync {blocked:.1f} ms ({share}).",
                    name=run.contestant,
                    least=least,
                    blocked=blocked,
                    share=share,
                )
            )
    return lines
