"""The plots of a comparison: throughput, where a step's time goes, and loss over time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.page.charts import OTHERS, Bar, BarGroup, Bars, Line, Lines, Panel, Segment
from benchmarks.page.document import Key, Plot
from benchmarks.page.language import known, mark, say
from benchmarks.page.scales import linear
from benchmarks.records.compare import Run
from benchmarks.reports.runs import Group, colours_of, in_step, milliseconds, rate, series

__all__ = ["plots"]

PHASES = {
    mark("input"): "#a9aeb6",
    mark("forward"): "#858b94",
    mark("backward"): "#606771",
    mark("wait"): "#b79ae6",
    mark("sync"): "#7b4fc9",
}


def plots(measured: Sequence[Group]) -> list[Plot]:
    """Throughput comes first: it shows who is fastest."""
    runs = [run for _, group in measured for run in group]
    colours = colours_of(runs)
    return [_throughput(measured, colours), _breakdown(measured), _loss(measured, colours)]


def _throughput(measured: Sequence[Group], colours: dict[str, str]) -> Plot:
    alone = [run.samples_per_s for n, runs in measured for run in runs if n == 1 and run.scheme == "local"]
    linear_rate = alone[0] if alone and len(measured) > 1 else None
    groups = [
        BarGroup(
            f"N={nranks}",
            [_bar(run, colours[series(run)]) for run in runs],
            mark=None if linear_rate is None else linear_rate * nranks,
        )
        for nranks, runs in measured
    ]
    heard = say("; ").join(
        f"N={nranks}: " + say(", ").join(f"{series(run)} {rate(run.samples_per_s)}" for run in runs)
        for nranks, runs in measured
    )
    return Plot(
        "compare-throughput",
        say("Throughput"),
        say(
            "Samples per second of all ranks together. Bars are medians over repetitions, lines are their "
            "intervals. Higher is better."
        ),
        say("Bars of samples per second. {heard}.", heard=heard),
        [] if linear_rate is None else [Key(say("linear scaling of local"), "var(--muted)", "dot")],
        Bars(groups),
    )


def _bar(run: Run, colour: str) -> Bar:
    value, (low, high) = run.samples_per_s, run.samples_per_s_interval
    speed = say("{rate} samples/s", rate=rate(value))
    words = f"{run.contestant}: {speed} ({rate(low)}–{rate(high)})"
    return Bar.single(series(run), rate(value), value, colour, words, interval=(low, high))


def _breakdown(measured: Sequence[Group]) -> Plot:
    runs = [run for _, group in measured for run in group]
    phases = list(dict.fromkeys(phase for run in runs for phase in run.phases_ms))
    colours = {phase: PHASES.get(phase, OTHERS[index % len(OTHERS)]) for index, phase in enumerate(phases)}
    groups = [BarGroup(f"N={nranks}", [_stack(run, colours) for run in group]) for nranks, group in measured]
    heard = say("; ").join(
        f"{run.contestant}: "
        + say(", ").join(f"{known(phase)} {milliseconds(ms)}" for phase, ms in run.phases_ms.items())
        for run in runs
    )
    return Plot(
        "compare-breakdown",
        say("Where a step's time goes"),
        say(
            "Median time of each phase on rank 0. Grey is computation. Violet is the cost of training in parallel: "
            "wait for slower ranks, sync for communication and the optimizer update. Beside a bar stands the sum of "
            "these medians, which is not the median of the step: medians do not add up."
        ),
        say("Stacked bars of milliseconds per step. {heard}.", heard=heard),
        [Key(known(phase), colour) for phase, colour in colours.items()],
        Bars(groups),
    )


def _stack(run: Run, colours: dict[str, str]) -> Bar:
    phases = run.phases_ms
    segments = [
        Segment(ms, colours[phase], f"{run.contestant}: {known(phase)} {milliseconds(ms)} ms")
        for phase, ms in phases.items()
    ]
    return Bar(series(run), f"{milliseconds(sum(phases.values()))} ms", segments)


def _loss(measured: Sequence[Group], colours: dict[str, str]) -> Plot:
    """A panel for each number of ranks, all with the same axes."""
    shown = [(nranks, [run for run in runs if run.curve]) for nranks, runs in measured]
    runs = [run for _, group in shown for run in group]
    seconds = [at for run in runs for at, _ in run.curve]
    losses = [loss for run in runs for _, loss in run.curve if math.isfinite(loss)]
    x = linear(say("seconds since the first step"), 0.0, max(seconds, default=1.0))
    y = linear(say("training loss"), 0.0, 1.05 * max(losses, default=1.0))
    panels = [
        Panel(f"N={nranks}", [Line(run.curve, colours[series(run)], [_end(run)]) for run in group], x, y)
        for nranks, group in shown
    ]
    apart = "" if all(map(in_step, runs)) else say(" Modes that update in another order have losses of their own.")
    return Plot(
        "compare-loss",
        say("Loss against wall time"),
        say(
            "Mean training loss over ranks, in the first round. At one N all contestants compute the same losses; they "
            "only reach them at different times."
        )
        + apart,
        say("Lines of training loss over seconds. {heard}.", heard=say("; ").join(map(_end, runs))),
        [Key(name, colour, "solid") for name, colour in colours.items()],
        Lines(panels),
    )


def _end(run: Run) -> str:
    return say(
        "{name}: {loss:#.3g} after {seconds:.1f} s",
        name=run.contestant,
        loss=run.loss.last,
        seconds=run.curve[-1][0],
    )
