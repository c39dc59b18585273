"""The figures of a comparison: its numbers as text, and its plots as Plotly dicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.page.language import known, mark, say
from benchmarks.page.plot import DASHES, OTHERS, Key, Plot, axis, layout, plain
from benchmarks.stats.interval import in_words
from benchmarks.training.contestants import TORCH
from ps.store.modes import parse_mode

__all__ = [
    "Group",
    "Run",
    "cells",
    "colours_of",
    "columns",
    "fastest",
    "in_step",
    "leads",
    "milliseconds",
    "plots",
    "races",
    "rate",
    "series",
]

Run = dict[str, Any]  # one of the "runs" of results.json
Group = tuple[int, list[Run]]  # a number of ranks and its runs

# Warm is the parameter server, cool the ring; all are apart for colour-blind eyes, and on white as on black.
KNOWN = {
    "local": "#7f8894",
    "ps/shm": "#c77700",
    "ps/shm S=2": "#cc3311",
    "ps/grpc": "#8c564b",
    "ring/shm": "#0077bb",
    "ring/tcp": "#1aa0b8",
}
PHASES = {
    mark("input"): "#a9aeb6",
    mark("forward"): "#858b94",
    mark("backward"): "#606771",
    mark("wait"): "#b79ae6",
    mark("sync"): "#7b4fc9",
}


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def milliseconds(value: float) -> str:
    """Three digits, or all those before the point: columns of them stay narrow."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def series(run: Run) -> str:
    """The contestant without its number of ranks: what has one name and one colour for all N."""
    return " ".join(word for word in str(run["contestant"]).split() if not word.startswith("N="))


def in_step(run: Run) -> bool:
    """Whether it computes the same as the others."""
    return parse_mode(run.get("mode", "sync")).in_step


def races(run: Run) -> bool:
    """Whether only its way to synchronise can make it faster than the others: it computes the same, with Paddle too."""
    return in_step(run) and run["scheme"] != TORCH


def fastest(runs: Iterable[Run]) -> Run:
    """Of those that race, if any do."""
    return max(runs, key=lambda run: (races(run), float(run["samples_per_s"])))


def leads(run: Run, runs: Sequence[Run]) -> bool:
    """Whether this is the fastest of several."""
    return len(runs) > 1 and run is fastest(runs)


def columns() -> list[tuple[str, str]]:
    """The heads of the results table, each with what stands below it."""
    return [
        (say("contestant"), ""),
        ("N", ""),
        (say("samples/s"), say("interval")),
        (say("step ms"), "p50/p99"),
        (say("sync ms"), "p50/p99"),
        (say("wait ms"), "p50"),
        (say("loss"), say("first→last")),
        (say("acc."), "%"),
    ]


def cells(run: Run) -> list[str]:
    """A run's line in the results table, in the order of `columns`."""
    step, sync = run["step_ms"], run["sync_ms"]
    return [
        series(run),
        str(run["nranks"]),
        f"{rate(run['samples_per_s'])} ({in_words(run['samples_per_s_interval'], rate)})",
        f"{milliseconds(step['p50'])}/{milliseconds(step['p99'])}",
        f"{milliseconds(sync['p50'])}/{milliseconds(sync['p99'])}",
        milliseconds(run["wait_ms"]["p50"]),
        f"{run['loss']['first']:#.3g}→{run['loss']['last']:#.3g}",
        "–" if run["accuracy"] is None else f"{100 * run['accuracy']:.1f}",
    ]


def plots(measured: Sequence[Group]) -> list[Plot]:
    """The three plots of a comparison."""
    runs = [run for _, group in measured for run in group]
    colours = colours_of(runs)
    return [_throughput(measured, colours), _breakdown(runs), _loss(runs, colours)]


def colours_of(runs: Iterable[Run]) -> dict[str, str]:
    """A colour for each series, the known ones first."""
    names = list(dict.fromkeys(series(run) for run in runs))
    others = [name for name in names if name not in KNOWN]
    known = {name: colour for name, colour in KNOWN.items() if name in names}
    return known | {name: OTHERS[index % len(OTHERS)] for index, name in enumerate(others)}


def _throughput(measured: Sequence[Group], colours: dict[str, str]) -> Plot:
    # Bars have computed places: Plotly's own grouping leaves a gap for each series that a group lacks.
    width = 0.84 / max(4, *(len(runs) for _, runs in measured))
    data: list[dict[str, Any]] = []
    for place, (_, runs) in enumerate(measured):
        for index, run in enumerate(runs):
            data.append(_bar(run, place + (index - (len(runs) - 1) / 2) * width, width, colours[series(run)]))
    legend = [Key(name, colour) for name, colour in colours.items()]
    alone = [run["samples_per_s"] for n, runs in measured for run in runs if n == 1 and run["scheme"] == "local"]
    if alone and len(measured) > 1:
        data.append(_linear([alone[0] * nranks for nranks, _ in measured]))
        legend.append(Key(say("linear scaling of local"), "var(--muted)", "dot"))
    places = list(range(len(measured)))
    names = [f"N={nranks}" for nranks, _ in measured]
    names_axis = axis(tickvals=places, ticktext=names, range=[-0.5, len(places) - 0.5])
    look = layout(xaxis=names_axis, yaxis=axis(title=say("samples/s"), rangemode="tozero", grid=True))
    heard = say("; ").join(
        f"N={nranks}: " + say(", ").join(f"{series(run)} {rate(run['samples_per_s'])}" for run in runs)
        for nranks, runs in measured
    )
    return Plot(
        "compare-throughput",
        say("Throughput"),
        say(
            "Samples per second of all ranks together: the median over repetitions, with a line for its interval, "
            "which for up to 12 repetitions is from the slowest to the fastest. Higher is better."
        ),
        say("Bars of samples per second. {heard}.", heard=heard),
        legend,
        380,
        {"data": data, "layout": look},
    )


def _bar(run: Run, x: float, width: float, colour: str) -> dict[str, Any]:
    value, (low, high) = run["samples_per_s"], run["samples_per_s_interval"]
    speed = say("{rate} samples/s", rate=rate(value))
    words = f"{plain(run['contestant'])}<br>{speed}<br>{rate(low)}–{rate(high)}"
    spread = {"array": [high - value], "arrayminus": [value - low], "symmetric": False, "type": "data"}
    return {
        "type": "bar",
        "x": [x],
        "y": [value],
        "width": width * 0.88,
        "marker": {"color": colour},
        "error_y": {**spread, "color": "var(--ink)", "thickness": 1.5, "width": 4},
        "hovertemplate": f"{words}<extra></extra>",
    }


def _linear(heights: Sequence[float]) -> dict[str, Any]:
    """A level line over each group of bars; None lifts the pen between them."""
    speed = say("{rate} samples/s", rate="%{y:,.0f}")
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [x for place in range(len(heights)) for x in (place - 0.46, place, place + 0.46, None)],
        "y": [y for height in heights for y in (height, height, height, None)],
        "line": {"color": "var(--muted)", "width": 2, "dash": "dot"},
        "hovertemplate": f"{say('linear scaling of local')}<br>{speed}<extra></extra>",
    }


def _breakdown(runs: Sequence[Run]) -> Plot:
    phases = list(dict.fromkeys(phase for run in runs for phase in run["phases_ms"]))
    colours = {phase: PHASES.get(phase, OTHERS[index % len(OTHERS)]) for index, phase in enumerate(phases)}
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [plain(run["contestant"]) for run in runs],
            "x": [run["phases_ms"].get(phase) for run in runs],
            "marker": {"color": colours[phase], "line": {"color": "var(--page)", "width": 1}},
            "hovertemplate": f"%{{y}}<br>{plain(known(phase))} %{{x:,.2f}} ms<extra></extra>",
        }
        for phase in phases
    ]
    look = layout(
        barmode="stack",
        bargap=0.35,
        xaxis=axis(title=say("ms per step"), grid=True),
        yaxis=axis(autorange="reversed", type="category"),
    )
    heard = say("; ").join(
        f"{run['contestant']}: "
        + say(", ").join(f"{known(phase)} {milliseconds(ms)}" for phase, ms in run["phases_ms"].items())
        for run in runs
    )
    return Plot(
        "compare-breakdown",
        say("Where a step's time goes"),
        say(
            "Median time of each phase on rank 0. Grey computes; violet is what training in parallel costs: wait is "
            "for slower ranks, sync for the exchange itself and the optimizer update."
        ),
        say("Stacked bars of milliseconds per step. {heard}.", heard=heard),
        [Key(known(phase), colour) for phase, colour in colours.items()],
        90 + 34 * len(runs),
        {"data": data, "layout": look},
    )


def _loss(runs: Sequence[Run], colours: dict[str, str]) -> Plot:
    sizes = list(dict.fromkeys(run["nranks"] for run in runs))
    dashes = {nranks: DASHES[index % len(DASHES)] for index, nranks in enumerate(sizes)}
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [seconds for seconds, _ in run["curve"]],
            # JSON has no NaN: where training diverged, the line ends.
            "y": [loss if math.isfinite(loss) else None for _, loss in run["curve"]],
            "line": {"color": colours[series(run)], "width": 2, "dash": dashes[run["nranks"]]},
            "hovertemplate": f"{plain(run['contestant'])}<br>%{{x:.2f}} s<br>{say('loss')} %{{y:.3f}}<extra></extra>",
        }
        for run in runs
    ]
    look = layout(
        xaxis=axis(title=say("seconds since the first step"), rangemode="tozero"),
        yaxis=axis(title=say("training loss"), rangemode="tozero", grid=True),
    )
    lines = [Key(name, colour, "solid") for name, colour in colours.items()]
    styles = [Key(f"N={nranks}", "var(--ink)", dash) for nranks, dash in dashes.items()] if len(dashes) > 1 else []
    heard = say("; ").join(
        say(
            "{name}: {loss:#.3g} after {seconds:.1f} s",
            name=run["contestant"],
            loss=run["loss"]["last"],
            seconds=run["curve"][-1][0],
        )
        for run in runs
        if run["curve"]
    )
    return Plot(
        "compare-loss",
        say("Loss against wall time"),
        say(
            "Mean training loss over ranks. At one N every contestant computes the same losses, so only the time at "
            "which each loss is reached differs."
        )
        + ("" if all(map(in_step, runs)) else say(" Modes in another order by design have losses of their own.")),
        say("Lines of training loss over seconds. {heard}.", heard=heard),
        [*lines, *styles],
        380,
        {"data": data, "layout": look},
    )
