"""The figures of `accuracy`: medians and bands over seeds, and its plots as Plotly dicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from benchmarks.page.language import say
from benchmarks.page.plot import Key, Plot, axis, layout, plain
from benchmarks.reports.compare_figures import Run, colours_of, rate, series

__all__ = ["Entry", "Spread", "entries", "not_reached", "percent", "plots", "seconds", "straggler_words"]

Results = dict[str, Any]  # what lies in accuracy.json
Trace = dict[str, Any]

PANEL_HEIGHT, PANEL_GAP = 270, 0.11  # pixels; share of the plot's height
LOSS_TICKS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]


class Spread(NamedTuple):
    """Over seeds: the median, the least and the greatest."""

    middle: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(median(values), min(values), max(values))

    def overlaps(self, other: Spread) -> bool:
        return self.low <= other.high and other.low <= self.high

    def text(self, number: Callable[[float], str], unit: str = "") -> str:
        band = f" ({number(self.low)}–{number(self.high)})" if self.low < self.high else ""
        return f"{number(self.middle)}{unit}{band}"


@dataclass(frozen=True)
class Entry:
    """One contestant under one straggler: a run for each seed."""

    name: str
    straggler: str
    runs: list[Run]

    @property
    def rate(self) -> Spread:
        """Samples/s of all ranks."""
        return self._over_seeds("samples_per_s")

    @property
    def target(self) -> Spread:
        """Seconds to the target; infinite where it was not reached."""
        return Spread.of([math.inf if run["target_s"] is None else run["target_s"] for run in self.runs])

    @property
    def reached(self) -> int:
        """How many seeds reached the target."""
        return sum(run["target_s"] is not None for run in self.runs)

    @property
    def whole(self) -> Spread:
        """Seconds of the whole training."""
        return self._over_seeds("seconds")

    @property
    def accuracy(self) -> Spread:
        """On the test split at the end, 0..1."""
        return self._over_seeds("accuracy")

    def curve(self, key: str) -> list[tuple[float, Spread]]:
        """Every evaluation: the median of its seconds, and what it found."""
        together = zip(*(run["points"] for run in self.runs), strict=False)
        return [
            (median(point["seconds"] for point in points), Spread.of([point[key] for point in points]))
            for points in together
        ]

    def _over_seeds(self, key: str) -> Spread:
        return Spread.of([run[key] for run in self.runs])


def entries(results: Results) -> list[list[Entry]]:
    """By straggler, contestants in the order of the certificate's and then of the modes."""
    found: dict[str, dict[str, Entry]] = {}
    for run in results["runs"]:
        mine = found.setdefault(run["straggler"], {})
        mine.setdefault(_name(run), Entry(_name(run), run["straggler"], [])).runs.append(run)
    order = sorted(found, key=("none", "permanent", "random").index)
    return [list(found[straggler].values()) for straggler in order]


def _name(run: Run) -> str:
    """As in "ps/shm sync", "ps/shm ssp:2", "ring/shm"."""
    return f"{series(run)}{' sync' if run['scheme'] == 'ps' and run['mode'] == 'sync' else ''}"


def straggler_words(straggler: str, job: dict[str, Any]) -> str:
    """Who is slow, as in "rank 1 slowed 3x"."""
    if straggler == "permanent":
        return say("rank {rank} slowed {factor:g}x", rank=job["nranks"] - 1, factor=job["factor"])
    if straggler == "random":
        return say("a random rank slowed {factor:g}x in each step", factor=job["factor"])
    return say("no straggler")


def short(value: float) -> str:
    """Seconds in about three digits."""
    if not math.isfinite(value):
        return say("not reached")
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def seconds(value: float | Spread) -> str:
    return value.text(short, " s") if isinstance(value, Spread) else f"{short(value)} s"


def percent(value: float | Spread) -> str:
    def number(share: float) -> str:
        return f"{100 * share:.1f}"

    return value.text(number, " %") if isinstance(value, Spread) else f"{100 * value:g} %"


def not_reached(entry: Entry) -> str:
    return say("not reached in {time}", time=seconds(entry.whole.middle))


def plots(results: Results) -> list[Plot]:
    """Samples/s and time to the target as bars, accuracy and loss over wall time as lines."""
    groups, job = entries(results), results["job"]
    shades = colours_of(results["runs"])
    colours = {_name(run): shades[series(run)] for run in results["runs"]}
    return [
        _bars(groups, job, colours),
        _curves(groups, job, colours, "accuracy"),
        _curves(groups, job, colours, "loss"),
    ]


def _bars(groups: Sequence[Sequence[Entry]], job: dict[str, Any], colours: dict[str, str]) -> Plot:
    width = 0.84 / max(map(len, groups))
    data = [
        trace
        for place, group in enumerate(groups)
        for index, entry in enumerate(group)
        for trace in _pair_of_bars(
            entry, job, place + (index - (len(group) - 1) / 2) * width, width, colours[entry.name]
        )
    ]
    factor = f"{job['factor']:g}x"
    short = {
        "none": say("no straggler"),
        "permanent": f"rank {job['nranks'] - 1}: {factor}",
        "random": say("random: {factor}", factor=factor),
    }
    names: dict[str, Any] = {
        "tickvals": list(range(len(groups))),
        "ticktext": [short[group[0].straggler] for group in groups],
        "range": [-0.5, len(groups) - 0.5],
    }
    target = percent(job["target"])
    look = layout(
        xaxis=axis(**names, anchor="y"),
        yaxis=axis(title=say("samples/s"), rangemode="tozero", grid=True, domain=[0.56, 1]),
        xaxis2=axis(**names, anchor="y2"),
        yaxis2=axis(title=say("seconds to {target}", target=target), rangemode="tozero", grid=True, domain=[0, 0.44]),
    )
    heard = say("; ").join(
        f"{straggler_words(group[0].straggler, job)}: " + say(", ").join(map(_bars_in_words, group)) for group in groups
    )
    return Plot(
        "accuracy-bars",
        say("Throughput and time to accuracy, with and without a straggler"),
        say(
            "Above, samples per second of all ranks together (higher is better); below, seconds until the test "
            "accuracy first reaches {target} (lower is better), hatched where it was not reached in all of the "
            "training. Medians over seeds, with a line from the least to the greatest.",
            target=target,
        ),
        say("Bars of samples per second and of seconds to {target}. {heard}.", target=target, heard=heard),
        [Key(name, colour) for name, colour in colours.items()],
        620,
        {"data": data, "layout": look},
    )


def _bars_in_words(entry: Entry) -> str:
    time = seconds(entry.target.middle) if math.isfinite(entry.target.middle) else not_reached(entry)
    return say("{name} {rate} samples/s, {time}", name=entry.name, rate=rate(entry.rate.middle), time=time)


def _pair_of_bars(entry: Entry, job: dict[str, Any], x: float, width: float, colour: str) -> list[Trace]:
    head = say("{name}, {straggler}", name=plain(entry.name), straggler=straggler_words(entry.straggler, job))
    common = {"type": "bar", "x": [x], "width": width * 0.88}
    speed = {
        **common,
        "y": [entry.rate.middle],
        "marker": {"color": colour},
        "error_y": _whisker(entry.rate),
        "hovertemplate": f"{head}<br>{say('{rate} samples/s', rate=entry.rate.text(rate))}<extra></extra>",
    }
    axes = {"xaxis": "x2", "yaxis": "y2"}
    if not math.isfinite(entry.target.middle):
        hatched = {"color": "rgba(0,0,0,0)", "line": {"color": colour, "width": 1.5}}
        pattern = {"shape": "/", "fgcolor": colour, "size": 7, "solidity": 0.25}
        missed = say(
            "{not_reached} by {missed} of {seeds} seeds",
            not_reached=not_reached(entry),
            missed=len(entry.runs) - entry.reached,
            seeds=len(entry.runs),
        )
        return [
            speed,
            {
                **common,
                **axes,
                "y": [entry.whole.middle],
                "marker": {**hatched, "pattern": pattern},
                "hovertemplate": f"{head}<br>{missed}<extra></extra>",
            },
        ]
    return [
        speed,
        {
            **common,
            **axes,
            "y": [entry.target.middle],
            "marker": {"color": colour},
            "error_y": _whisker(entry.target._replace(high=min(entry.target.high, max(entry.whole.high, 0.0)))),
            "hovertemplate": f"{head}<br>{seconds(entry.target)}<extra></extra>",
        },
    ]


def _whisker(spread: Spread) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [spread.high - spread.middle],
        "arrayminus": [spread.middle - spread.low],
        "color": "var(--ink)",
        "thickness": 1.5,
        "width": 3,
    }


def _curves(groups: Sequence[Sequence[Entry]], job: dict[str, Any], colours: dict[str, str], key: str) -> Plot:
    """A panel for each straggler, all with the same axes."""
    longest = max(entry.curve(key)[-1][0] for group in groups for entry in group)
    target, accuracy = job["target"], key == "accuracy"
    scale = 100 if accuracy else 1
    data: list[Trace] = []
    look = layout(annotations=[], shapes=[], margin={"l": 8, "r": 8, "t": 28, "b": 8})
    for panel, group in enumerate(groups):
        suffix = str(panel + 1) if panel else ""
        x, y = f"x{suffix}", f"y{suffix}"
        for entry in group:
            data += _line_with_band(entry, key, scale, colours[entry.name], {"xaxis": x, "yaxis": y})
        height = (1 - PANEL_GAP * (len(groups) - 1)) / len(groups)
        bottom = (len(groups) - 1 - panel) * (height + PANEL_GAP)
        last = panel == len(groups) - 1
        look[f"xaxis{suffix}"] = axis(
            title=say("seconds since the first step") if last else "", range=[0, 1.02 * longest], anchor=y
        )
        settings: dict[str, Any] = {"domain": [bottom, min(1.0, bottom + height)], "anchor": x}
        if accuracy:
            settings["range"] = [100 * max(0.0, 1 - 5 * (1 - target)), 100]
        else:
            settings |= {"type": "log", "tickvals": LOSS_TICKS}
        title = say("test accuracy, %") if accuracy else say("training loss")
        look[f"yaxis{suffix}"] = axis(title=title, grid=True, **settings)
        words = straggler_words(entry.straggler, job)
        place = {"xref": f"{x} domain", "yref": f"{y} domain", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom"}
        look["annotations"].append({**place, "text": f"<b>{words}</b>", "showarrow": False})
        if accuracy:
            ends = {"x0": 0, "x1": 1, "y0": 100 * target, "y1": 100 * target}
            line = {"color": "var(--muted)", "width": 1.5, "dash": "dot"}
            look["shapes"].append({"type": "line", "xref": f"{x} domain", "yref": y, **ends, "line": line})
    legend = [Key(name, colour, "solid") for name, colour in colours.items()]
    if accuracy:
        legend.append(Key(say("target {target}", target=percent(target)), "var(--muted)", "dot"))
    mark = (
        say(
            " A mark is an evaluation on the test split, every {every} steps of rank 0; the last is of the parameters "
            "on which all ranks have settled.",
            every=job["eval_every"],
        )
        if accuracy
        else say(" A mark is the mean over ranks and over the steps since the last one.")
    )
    heard = _ends(groups, job, key)
    return Plot(
        f"accuracy-{'curves' if accuracy else 'loss'}",
        say("Accuracy against wall time") if accuracy else say("Training loss against wall time"),
        say("A line through the medians over seeds, in a band from the least to the greatest.") + mark,
        say("Lines of test accuracy over seconds. {heard}.", heard=heard)
        if accuracy
        else say("Lines of training loss over seconds. {heard}.", heard=heard),
        legend,
        PANEL_HEIGHT * len(groups),
        {"data": data, "layout": look},
    )


def _ends(groups: Iterable[Sequence[Entry]], job: dict[str, Any], key: str) -> str:
    def last(entry: Entry) -> str:
        at, found = entry.curve(key)[-1]
        value = f"{100 * found.middle:.1f} %" if key == "accuracy" else f"{found.middle:.3g}"
        return say("{name} {value} after {time}", name=entry.name, value=value, time=seconds(at))

    return say("; ").join(
        f"{straggler_words(group[0].straggler, job)}: " + say(", ").join(map(last, group)) for group in groups
    )


def _line_with_band(entry: Entry, key: str, scale: float, colour: str, axes: dict[str, str]) -> list[Trace]:
    def words(spread: Spread) -> str:
        return percent(spread) if key == "accuracy" else spread.text("{:.3g}".format)

    # JSON has no NaN: where training diverged, the line ends.
    curve = [(at, spread) for at, spread in entry.curve(key) if all(map(math.isfinite, spread))]
    at = [x for x, _ in curve]
    low, high = [scale * spread.low for _, spread in curve], [scale * spread.high for _, spread in curve]
    band = {
        "x": at + at[::-1],
        "y": high + low[::-1],
        "mode": "lines",
        "line": {"width": 0},
        "fill": "toself",
        "fillcolor": _faint(colour),
        "hoverinfo": "skip",
    }
    line = {
        "x": at,
        "y": [scale * spread.middle for _, spread in curve],
        "mode": "lines+markers",
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 5},
        "hovertext": [f"{plain(entry.name)}<br>{seconds(x)}<br>{words(spread)}" for x, spread in curve],
        "hoverinfo": "text",
    }
    return [{"type": "scatter", **axes, **trace} for trace in (band, line)]


def _faint(colour: str) -> str:
    """
    >>> _faint("#0077bb")
    'rgba(0,119,187,0.16)'
    """
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"
