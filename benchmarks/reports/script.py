"""The report of a user's program under each scheme (script.json)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

from benchmarks.page import markdown
from benchmarks.page.html_page import page, plot_section, row, section, table, verdict_box
from benchmarks.page.language import say
from benchmarks.page.plot import OTHERS, Key, Plot, axis, layout, plain
from benchmarks.page.reasons import reason
from benchmarks.reports.compare import environment_table, noise_in_words
from benchmarks.reports.compare_figures import KNOWN, series
from benchmarks.reports.compare_page import environment_section
from benchmarks.stats.interval import in_words, measured
from benchmarks.training.contestants import PADDLE_SCHEMES

__all__ = ["cells", "distances", "heads", "outcome", "plots", "sections", "to_html", "to_markdown", "verdict"]

Results = dict[str, Any]  # what lies in script.json
Run = dict[str, Any]


def verdict(results: Results) -> list[str]:
    """The bits first, then who is fastest at each number of ranks, then who failed."""
    failed = [
        say("{name} failed: {why}.", name=name, why=reason(found["reason"]))
        for name, found in results["failed"].items()
    ]
    certificate = results["certificate"]
    bits = _sentence(outcome(certificate))
    if not certificate["passed"]:
        return [say("{bits}; no speed is shown.", bits=bits), *distances(results), *failed]
    return [
        say("{bits}.", bits=bits),
        *distances(results),
        *(_race(nranks, runs) for nranks, runs in _groups(results)),
        *failed,
    ]


def outcome(certificate: dict[str, Any]) -> str:
    """What the certificate says, without a full stop."""
    if not certificate["identical"]:
        return say("NOT the same under all schemes")
    if not certificate["passed"]:
        return say("the same bits under every scheme of ours, but too far from paddle.DataParallel")
    ran = len(certificate["ours"])
    if ran > 1:
        return say("the same bits under every scheme of ours")
    return say("nothing to compare ({ran} of ours ran)", ran=ran)


def distances(results: Results) -> list[str]:
    """From Paddle's own DataParallel, a sentence for each of its contestants."""
    certificate = results["certificate"]
    bounds = {int(steps): bound for steps, bound in certificate["bounds"].items()}
    made = {run["contestant"]: run["steps"] for run in results["runs"] if "steps" in run}
    lines = []
    for peer, found in certificate["against_paddle"].items():
        last = max(map(int, found))
        steps = min(made.get(peer, last), last)
        if peer in certificate.get("own_kernels", []):
            lines.append(
                say(
                    "{peer} leaves the choice of matrix kernels to MKL, so its time says little of the exchange; its "
                    "parameters are held against ours made so too.",
                    peer=peer,
                )
            )
        if not any(found.values()):
            lines.append(say("Against {peer}, steps 1 to {steps}: the same bits.", peer=peer, steps=steps))
            continue
        yardstick = certificate.get("yardsticks", {}).get(peer, {})
        apart = [
            _distance(d, min(steps, int(after)), bounds[int(after)], yardstick.get(after)) for after, d in found.items()
        ]
        lines.append(
            say(
                "Against {peer}, steps 1 to {steps}: relative difference {apart}.",
                peer=peer,
                steps=steps,
                apart=say(", ").join(apart),
            )
        )
    return lines


def _distance(apart: float, steps: int, bound: float, yardstick: dict[str, float] | None) -> str:
    """Beside the fixed bound, or where that was exceeded, beside what another order of summation does to ours."""
    if yardstick is None:
        return say("{apart:.1e} after {steps} (bound {bound:.0e})", apart=apart, steps=steps, bound=bound)
    return say(
        "{apart:.1e} after {steps} (another order of our own sums: {other:.1e}; bound {bound:.0e})",
        apart=apart,
        steps=steps,
        other=yardstick["distance"],
        bound=yardstick["bound"],
    )


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
    winner = {"nranks": nranks, "name": series(first), "step_ms": first["step_ms"]}
    if not others:
        return say("N={nranks}: {name} takes {step_ms:.1f} ms a step; nothing else was measured.", **winner)
    told, clear = [], True
    for run in others:
        near = not measured(run, "step_ms").against(measured(first, "step_ms"))
        clear = clear and not near
        once = say(", noise unknown") if min(run["repetitions"], first["repetitions"]) < 2 else ""
        slower = run["step_ms"] / first["step_ms"] - 1
        behind = say("within noise of it") if near else say("{slower:.1%} slower{once}", slower=slower, once=once)
        told.append(say("{name} {step_ms:.1f} ms ({behind})", name=series(run), step_ms=run["step_ms"], behind=behind))
    return say(
        "N={nranks}: {name} is the fastest with {step_ms:.1f} ms a step; {others}."
        if clear
        else "N={nranks}: {name} has the least median, {step_ms:.1f} ms a step; {others}.",
        **winner,
        others=say(", ").join(told),
    )


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
            "hovertemplate": f"%{{y}}<br>{say('{time} ms a step', time='%{x:,.1f}')}<extra></extra>",
        }
        for run in runs
    ]
    look = layout(
        bargap=0.35,
        xaxis=axis(title=say("ms per step"), grid=True, rangemode="tozero"),
        yaxis=axis(autorange="reversed", type="category"),
    )
    heard = say(", ").join(f"{run['contestant']} {run['step_ms']:.1f}" for run in runs)
    return [
        Plot(
            "script-steps",
            say("Time of a step"),
            say(
                "Milliseconds between the ends of two backwards on rank 0: the median over repetitions of each one's "
                "median, with its interval. Lower is better."
            ),
            say("Bars of milliseconds per step: {heard}.", heard=heard),
            [Key(name, colour) for name, colour in colours.items()],
            90 + 34 * len(runs),
            {"data": data, "layout": look},
        )
    ]


def sections(results: Results) -> list[str]:
    """The certificate, and if there are speeds, the plot and the table of them."""
    certificate = results["certificate"]
    lines = [row([escape(n), f"<code>{escape(sha[:12])}</code>"]) for n, sha in certificate["schemes"].items()]
    digests = table(say("Parameters at the end"), (say("contestant"), "sha256"), [lines])
    found = [section(say("Certificate"), digests)]
    bodies = [[row(map(escape, cells(run, results["runs"]))) for run in runs] for _, runs in _groups(results)]
    if bodies:
        found += map(plot_section, plots(results))
        noise = f"<p>{escape(noise_in_words())}</p>"
        found.append(section(say("Results"), table(say("Step times"), heads(), bodies, look="figures wide"), noise))
    return found


def heads() -> list[str]:
    """Of the table of step times."""
    against = [say("vs {peer}", peer=peer) for peer in PADDLE_SCHEMES]
    return [say("contestant"), say("step ms"), say("interval"), *against, say("memory MB")]


def cells(run: Run, runs: Sequence[Run]) -> list[str]:
    """A run's line, in the order of `heads`."""
    interval = in_words(run["step_ms_interval"], "{:.1f}".format)
    ratios = [speedup(run, runs, peer) for peer in PADDLE_SCHEMES]
    return [run["contestant"], f"{run['step_ms']:.1f}", interval, *ratios, f"{run['memory_mb']:,.0f}"]


def to_markdown(results: Results) -> str:
    lines = [markdown.row(cells(run, results["runs"])) for _, runs in _groups(results) for run in runs]
    parts = [
        f"## {say('A program under each scheme')}",
        markdown.bullets(verdict(results)),
        markdown.table(heads(), lines, numeric=True) if lines else "",
        noise_in_words() if lines else "",
        f"### {say('Environment')}",
        environment_table(results),
        f"```console\n{results['command']}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def to_html(results: Results) -> str:
    """The whole report as a page; every string of the results is escaped."""
    drawn = plots(results)
    box = verdict_box(verdict(results), failed=not results["certificate"]["passed"])
    parts = [*sections(results), environment_section(results)]
    return page(say("GradSync: your program under each scheme"), box, parts, drawn)
