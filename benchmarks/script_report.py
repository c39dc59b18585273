"""The report of a user's program under each scheme (script.json)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

from benchmarks import markdown
from benchmarks.contestants import PADDLE_SCHEMES
from benchmarks.figures import KNOWN, series
from benchmarks.html_page import page, plot_section, row, section, table, verdict_box
from benchmarks.html_report import environment_section
from benchmarks.plot import OTHERS, Key, Plot, axis, layout, plain
from benchmarks.report import environment

__all__ = ["HEADS", "cells", "distances", "outcome", "plots", "sections", "to_html", "to_markdown", "verdict"]

Results = dict[str, Any]  # what lies in script.json
Run = dict[str, Any]
HEADS = ("contestant", "step ms", "interval", "vs paddle", "vs paddle-default", "memory MB")


def verdict(results: Results) -> list[str]:
    """The bits first, then who is fastest at each number of ranks, then who failed."""
    failed = [f"{name} failed: {found['reason'].rstrip('.')}." for name, found in results["failed"].items()]
    certificate = results["certificate"]
    if not certificate["passed"]:
        return [f"{_sentence(outcome(certificate))}; no speed is shown.", *distances(results), *failed]
    return [
        f"{_sentence(outcome(certificate))}.",
        *distances(results),
        *(_race(nranks, runs) for nranks, runs in _groups(results)),
        *failed,
    ]


def outcome(certificate: dict[str, Any]) -> str:
    """What the certificate says, without a full stop."""
    if not certificate["identical"]:
        return "NOT the same under all schemes"
    if not certificate["passed"]:
        return "the same bits under every scheme of ours, but too far from paddle.DataParallel"
    names = certificate["ours"]
    return (
        "the same bits under every scheme of ours"
        if len(names) > 1
        else f"nothing to compare ({len(names)} of ours ran)"
    )


def distances(results: Results) -> list[str]:
    """From Paddle's own DataParallel, a sentence for each of its contestants."""
    certificate = results["certificate"]
    bounds = {int(steps): bound for steps, bound in certificate["bounds"].items()}
    lines = []
    for peer, found in certificate["against_paddle"].items():
        apart = ", ".join(f"{d:.1e} after {steps} (bound {bounds[int(steps)]:.0e})" for steps, d in found.items())
        text = f"relative difference {apart}" if any(found.values()) else "the same bits"
        lines.append(f"Against {peer}, steps 1 to {max(map(int, found))}: {text}.")
    return lines


def speedup(run: Run, runs: Sequence[Run], peer: str) -> str:
    """The peer's median step time over this one's, at the same number of ranks; "" if it did not run."""
    of_peer = [r["step_ms"] for r in runs if r["scheme"] == peer and r["nranks"] == run["nranks"]]
    return f"{of_peer[0] / run['step_ms']:.2f}x" if of_peer else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _groups(results: Results) -> list[tuple[int, list[Run]]]:
    runs = sorted(results["runs"] if results["certificate"]["passed"] else [], key=lambda run: int(run["nranks"]))
    return [(nranks, list(group)) for nranks, group in groupby(runs, key=lambda run: int(run["nranks"]))]


def _race(nranks: int, runs: Sequence[Run]) -> str:
    """The fastest, and every other one against it."""
    first, *others = sorted(runs, key=lambda run: float(run["step_ms"]))
    if not others:
        return f"N={nranks}: {series(first)} takes {first['step_ms']:.1f} ms a step; nothing else was measured."
    told = []
    for run in others:
        near = run["step_ms_interval"][0] <= first["step_ms_interval"][1]
        once = ", noise unknown" if min(run["repetitions"], first["repetitions"]) < 2 else ""
        behind = "within noise of it" if near else f"{run['step_ms'] / first['step_ms'] - 1:.1%} slower{once}"
        told.append(f"{series(run)} {run['step_ms']:.1f} ms ({behind})")
    return f"N={nranks}: {series(first)} is the fastest with {first['step_ms']:.1f} ms a step; {', '.join(told)}."


def plots(results: Results) -> list[Plot]:
    """Step times as bars; none without speeds."""
    measured = _groups(results)
    runs = [run for _, group in measured for run in group]
    if not runs:
        return []
    names = list(dict.fromkeys(series(run) for run in runs))
    others = iter(OTHERS * len(names))
    colours = {name: KNOWN[name] if name in KNOWN else next(others) for name in names}
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [plain(run["contestant"])],
            "x": [run["step_ms"]],
            "marker": {"color": colours[series(run)]},
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [run["step_ms_interval"][1] - run["step_ms"]],
                "arrayminus": [run["step_ms"] - run["step_ms_interval"][0]],
                "color": "var(--ink)",
                "thickness": 1.5,
                "width": 4,
            },
            "hovertemplate": "%{y}<br>%{x:,.1f} ms a step<extra></extra>",
        }
        for run in runs
    ]
    look = layout(
        bargap=0.35,
        xaxis=axis(title="ms per step", grid=True, rangemode="tozero"),
        yaxis=axis(autorange="reversed", type="category"),
    )
    heard = ", ".join(f"{run['contestant']} {run['step_ms']:.1f}" for run in runs)
    return [
        Plot(
            "script-steps",
            "Time of a step",
            "Milliseconds between the ends of two backwards on rank 0: the median over repetitions of each one's "
            "median, with its interval. Lower is better.",
            f"Bars of milliseconds per step: {heard}.",
            [Key(name, colour) for name, colour in colours.items()],
            90 + 34 * len(runs),
            {"data": data, "layout": look},
        )
    ]


def sections(results: Results) -> list[str]:
    """The certificate, and if there are speeds, the plot and the table of them."""
    certificate = results["certificate"]
    lines = [row([escape(n), f"<code>{escape(sha[:12])}</code>"]) for n, sha in certificate["schemes"].items()]
    found = [section("Certificate", table("Parameters at the end", ("contestant", "sha256"), [lines]))]
    bodies = [[row(map(escape, cells(run, results["runs"]))) for run in runs] for _, runs in _groups(results)]
    if bodies:
        found += map(plot_section, plots(results))
        found.append(section("Results", table("Step times", HEADS, bodies, look="figures wide")))
    return found


def cells(run: Run, runs: Sequence[Run]) -> list[str]:
    """A run's line, in the order of HEADS."""
    low, high = run["step_ms_interval"]
    ratios = [speedup(run, runs, peer) for peer in PADDLE_SCHEMES]
    return [run["contestant"], f"{run['step_ms']:.1f}", f"{low:.1f}–{high:.1f}", *ratios, f"{run['memory_mb']:,.0f}"]


def to_markdown(results: Results) -> str:
    lines = [markdown.row(cells(run, results["runs"])) for _, runs in _groups(results) for run in runs]
    parts = [
        "## A program under each scheme",
        markdown.bullets(verdict(results)),
        markdown.table(HEADS, lines, numeric=True) if lines else "",
        "### Environment",
        markdown.table(("what", "value"), [markdown.row(fact) for fact in environment(results)]),
        f"```console\n{results['command']}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def to_html(results: Results) -> str:
    """The whole report as a page; every string of the results is escaped."""
    drawn = plots(results)
    box = verdict_box(verdict(results), failed=not results["certificate"]["passed"])
    parts = [*sections(results), environment_section(results)]
    return page("GradSync: your program under each scheme", box, parts, drawn)
