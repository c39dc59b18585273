"""The plots of `accuracy`: time to the target and samples/s as bars, accuracy and loss over wall time as lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from benchmarks.page.charts import Bar, BarGroup, Bars, Line, Lines, Panel
from benchmarks.page.document import Key, Plot
from benchmarks.page.language import say
from benchmarks.page.scales import Axis, linear, logarithmic
from benchmarks.records.accuracy import AccuracyResults, Job
from benchmarks.reports.accuracy.entries import (
    Entry,
    Spread,
    colours,
    entries,
    missed,
    not_reached,
    percent,
    seconds,
    straggler_words,
)
from benchmarks.reports.runs import rate

__all__ = ["plots"]

Curve = Literal["accuracy", "loss"]
Groups = Sequence[Sequence[Entry]]
Colours = dict[str, str]


def plots(results: AccuracyResults) -> list[Plot]:
    groups, job, shades = entries(results), results.job, colours(results)
    return [
        _times(groups, job, shades),
        _rates(groups, job, shades),
        _accuracy(groups, job, shades),
        _loss(groups, job, shades),
    ]


def _bars(groups: Groups, job: Job, bar: Callable[[Entry], Bar]) -> Bars:
    return Bars(
        [BarGroup(straggler_words(group[0].straggler, job), [bar(entry) for entry in group]) for group in groups]
    )


def _heard(groups: Groups, job: Job, words: Callable[[Entry], str]) -> str:
    return say("; ").join(
        f"{straggler_words(group[0].straggler, job)}: " + say(", ").join(map(words, group)) for group in groups
    )


def _times(groups: Groups, job: Job, colours: Colours) -> Plot:
    target = percent(job.target)

    def bar(entry: Entry) -> Bar:
        spread, colour = entry.target, colours[entry.name]
        head = say("{name}, {straggler}", name=entry.name, straggler=straggler_words(entry.straggler, job))
        if not math.isfinite(spread.middle):
            words = f"{head}: {missed(entry)}"
            return Bar.single(entry.name, say("not reached"), entry.whole.middle, colour, words, hatched=True)
        interval = (spread.low, min(spread.high, entry.whole.high))
        text = seconds(spread.middle)
        return Bar.single(entry.name, text, spread.middle, colour, f"{head}: {seconds(spread)}", interval=interval)

    def words(entry: Entry) -> str:
        time = seconds(entry.target.middle) if math.isfinite(entry.target.middle) else not_reached(entry)
        return f"{entry.name} {time}"

    return Plot(
        "accuracy-times",
        say("Time to {target} accuracy, with and without a straggler", target=target),
        say(
            "Seconds until the test accuracy first reaches {target}. Bars are medians over seeds, lines go from "
            "the least to the greatest. Hatched: not reached during the whole training. Lower is better.",
            target=target,
        ),
        say("Bars of seconds to {target}. {heard}.", target=target, heard=_heard(groups, job, words)),
        [],
        _bars(groups, job, bar),
    )


def _rates(groups: Groups, job: Job, colours: Colours) -> Plot:
    def bar(entry: Entry) -> Bar:
        spread, colour = entry.rate, colours[entry.name]
        head = say("{name}, {straggler}", name=entry.name, straggler=straggler_words(entry.straggler, job))
        words = f"{head}: {say('{rate} samples/s', rate=spread.text(rate))}"
        return Bar.single(
            entry.name, rate(spread.middle), spread.middle, colour, words, interval=(spread.low, spread.high)
        )

    def words(entry: Entry) -> str:
        return f"{entry.name} {rate(entry.rate.middle)}"

    return Plot(
        "accuracy-rates",
        say("Throughput with and without a straggler"),
        say(
            "Samples per second of all ranks together. Bars are medians over seeds, lines go from the least to "
            "the greatest. Higher is better."
        ),
        say("Bars of samples per second. {heard}.", heard=_heard(groups, job, words)),
        [],
        _bars(groups, job, bar),
    )


def _accuracy(groups: Groups, job: Job, colours: Colours) -> Plot:
    target = job.target
    y = linear(say("test accuracy, %"), 100 * max(0.0, 1 - 5 * (1 - target)), 100.0)

    def last(entry: Entry) -> str:
        at, found = entry.curve("accuracy")[-1]
        return _end(entry.name, f"{100 * found.middle:.1f} %", at)

    return Plot(
        "accuracy-curves",
        say("Accuracy against wall time"),
        say("Lines are medians over seeds, bands go from the least to the greatest.")
        + say(
            " Each mark is an evaluation on the test split, every {every} steps of rank 0. The last one is of the"
            " final parameters.",
            every=job.eval_every,
        ),
        say("Lines of test accuracy over seconds. {heard}.", heard=_heard(groups, job, last)),
        [*_names(colours), Key(say("target {target}", target=percent(target)), "var(--muted)", "dot")],
        _panels(groups, job, colours, "accuracy", y, level=100 * target),
    )


def _loss(groups: Groups, job: Job, colours: Colours) -> Plot:
    losses = [
        loss
        for group in groups
        for entry in group
        for _, spread in entry.curve("loss")
        for loss in spread
        if math.isfinite(loss) and loss > 0
    ]
    y = logarithmic(say("training loss"), 0.9 * min(losses, default=0.1), 1.1 * max(losses, default=1.0))

    def last(entry: Entry) -> str:
        at, found = entry.curve("loss")[-1]
        return _end(entry.name, f"{found.middle:.3g}", at)

    return Plot(
        "accuracy-loss",
        say("Training loss against wall time"),
        say("Lines are medians over seeds, bands go from the least to the greatest.")
        + say(" Each mark is the mean over ranks and over the steps since the last mark."),
        say("Lines of training loss over seconds. {heard}.", heard=_heard(groups, job, last)),
        _names(colours),
        _panels(groups, job, colours, "loss", y),
    )


def _end(name: str, value: str, at: float) -> str:
    return say("{name} {value} after {time}", name=name, value=value, time=seconds(at))


def _names(colours: Colours) -> list[Key]:
    return [Key(name, colour, "solid") for name, colour in colours.items()]


def _panels(groups: Groups, job: Job, colours: Colours, key: Curve, y: Axis, *, level: float | None = None) -> Lines:
    """A panel for each straggler, all with the same axes."""
    longest = max(entry.curve(key)[-1][0] for group in groups for entry in group)
    x = linear(say("seconds since the first step"), 0.0, 1.02 * longest)
    return Lines(
        [
            Panel(
                straggler_words(group[0].straggler, job),
                [_line_with_band(entry, key, colours[entry.name]) for entry in group],
                x,
                y,
                level,
            )
            for group in groups
        ]
    )


def _line_with_band(entry: Entry, key: Curve, colour: str) -> Line:
    scale = 100 if key == "accuracy" else 1
    curve = entry.curve(key)

    def words(spread: Spread) -> str:
        return percent(spread) if key == "accuracy" else spread.text("{:.3g}".format)

    return Line(
        [(at, scale * spread.middle) for at, spread in curve],
        colour,
        [f"{entry.name}, {seconds(at)}: {words(spread)}" for at, spread in curve],
        marks=True,
        band=[(at, scale * spread.low, scale * spread.high) for at, spread in curve],
    )
