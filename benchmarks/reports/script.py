"""The report of a user's program under each scheme (script.json)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby

from benchmarks.contestants.table_of_trainings import PADDLE_SCHEMES
from benchmarks.page.charts import Bar, BarGroup, Bars
from benchmarks.page.document import Block, Cell, Fold, Paragraph, Plot, Report, Row, Section, Table
from benchmarks.page.language import listed, say
from benchmarks.page.reasons import reason
from benchmarks.records.script import Certificate, ScriptResults, ScriptRun, Yardstick
from benchmarks.reports.facts import busy, environment, noise_in_words, too_few_rounds
from benchmarks.reports.runs import colours_of, series
from benchmarks.stats.interval import LEAST_ROUNDS, in_words

__all__ = ["cells", "heads", "is_bad", "notes", "report", "verdict", "why_not_all"]


def verdict(results: ScriptResults, *, without: Collection[str] = ()) -> list[str]:
    """The bits first, then who is fastest at each number of ranks, then who failed; a reason of several is said once.

    Args:
        without: contestants whose failure is told elsewhere.
    """
    alike: dict[str, list[str]] = {}
    for name, found in results.failed.items():
        if name not in without:
            alike.setdefault(found.reason, []).append(name)
    failed = [say("{name} failed: {why}.", name=say(", ").join(names), why=reason(why)) for why, names in alike.items()]
    certificate = results.certificate
    bits = _sentence(_outcome(certificate))
    if not certificate.passed:
        return [say("{bits}; no speed is shown.", bits=bits), *_distances(results), *failed]
    return [
        say("{bits}.", bits=bits),
        *_distances(results),
        *(_race(nranks, runs) for nranks, runs in _groups(results)),
        *too_few_rounds(min(_rounds_of_races(results), default=LEAST_ROUNDS)),
        *busy(
            ([run.step for run in runs] for _, runs in _groups(results)),
            min(_rounds_of_races(results), default=LEAST_ROUNDS),
        ),
        *failed,
    ]


def _outcome(certificate: Certificate) -> str:
    """What the certificate says, without a full stop."""
    if not certificate.identical:
        return say("NOT the same under all schemes")
    if not certificate.passed:
        if not _several(certificate):
            return say("our parameters are too far from paddle.DataParallel")
        return say("the same bits under every scheme of ours, but too far from paddle.DataParallel")
    if _several(certificate):
        return say("the same bits under every scheme of ours")
    if rivals := certificate.against_paddle:
        return say(
            "compared with {rivals} only, for no two schemes of ours ran at the same N", rivals=listed([*rivals])
        )
    if not certificate.schemes:
        return say("nothing to compare, for no run ended well")
    return say("nothing to compare ({ran} of ours ran)", ran=len(certificate.ours))


def _several(certificate: Certificate) -> bool:
    """Whether two of ours ran at the same number of ranks."""
    counts = Counter(name.rpartition("N=")[2] for name in certificate.ours)
    return max(counts.values(), default=0) > 1


def is_bad(results: ScriptResults) -> bool:
    """Whether the certificate failed, or all of ours did."""
    return not results.certificate.passed or bool(results.failed and not results.certificate.ours)


def _distances(results: ScriptResults) -> list[str]:
    """From Paddle's own DataParallel, a sentence for each of its contestants."""
    certificate = results.certificate
    made = {run.contestant: run.steps for run in results.runs}
    lines = []
    for rival, found in certificate.against_paddle.items():
        last = max(found)
        steps = min(made.get(rival, last), last)
        if rival in certificate.own_kernels:
            lines.append(
                say(
                    "{rival} lets MKL choose the matrix kernels, so its time says little about communication. It "
                    "is compared with runs of ours that do the same.",
                    rival=rival,
                )
            )
        if not any(found.values()):
            lines.append(say("Against {rival}, steps 1 to {steps}: the same bits.", rival=rival, steps=steps))
            continue
        yardstick = certificate.yardsticks.get(rival, {})
        apart = [
            _distance(distance, min(steps, after), certificate.bounds[after], yardstick.get(after))
            for after, distance in found.items()
        ]
        lines.append(
            say(
                "Against {rival}, steps 1 to {steps}: relative difference {apart}.",
                rival=rival,
                steps=steps,
                apart=say(", ").join(apart),
            )
        )
    return lines


def why_not_all(results: ScriptResults) -> list[str]:
    """Why Paddle's parameters were not compared at the end of a longer program."""
    last = max(results.certificate.bounds, default=0)
    if not results.certificate.against_paddle or max((run.steps for run in results.runs), default=0) <= last:
        return []
    return [
        say(
            "Beside Paddle the parameters are compared after {counts} steps and no later: rounding alone takes two "
            "equally good trainings ever further apart.",
            counts=listed([str(count) for count in sorted(results.certificate.bounds)]),
        )
    ]


def _distance(apart: float, steps: int, bound: float, yardstick: Yardstick | None) -> str:
    """Beside the fixed bound, or where that was exceeded, beside what another order of summation does to ours."""
    if yardstick is None:
        return say("{apart:.1e} after {steps} (bound {bound:.0e})", apart=apart, steps=steps, bound=bound)
    return say(
        "{apart:.1e} after {steps} (another order of our own sums: {other:.1e}; bound {bound:.0e})",
        apart=apart,
        steps=steps,
        other=yardstick.distance,
        bound=yardstick.bound,
    )


def speedup(run: ScriptRun, runs: Sequence[ScriptRun], rival: str) -> str:
    """The rival's median step time over this one's, at the same number of ranks, where it may have failed."""
    of_rival = [r.step_ms for r in runs if r.scheme == rival and r.nranks == run.nranks]
    return f"{of_rival[0] / run.step_ms:.2f}x" if of_rival else say("failed")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _groups(results: ScriptResults) -> list[tuple[int, list[ScriptRun]]]:
    runs = sorted(results.runs if results.certificate.passed else [], key=lambda run: int(run.nranks))
    return [(nranks, list(group)) for nranks, group in groupby(runs, key=lambda run: int(run.nranks))]


def _rounds_of_races(results: ScriptResults) -> list[int]:
    return [run.repetitions for _, runs in _groups(results) if len(runs) > 1 for run in runs]


def _race(nranks: int, runs: Sequence[ScriptRun]) -> str:
    """The fastest, and every other one against it."""
    first, *others = sorted(runs, key=lambda run: float(run.step_ms))
    winner = {"nranks": nranks, "name": series(first), "step_ms": first.step_ms}
    if not others:
        return say("N={nranks}: {name} takes {step_ms:.1f} ms a step; nothing else was measured.", **winner)
    told, clear, level = [], True, True
    for run in others:
        few = min(run.repetitions, first.repetitions) < LEAST_ROUNDS
        near = not few and not run.step.against(first.step)
        clear = clear and not near and not few
        level = level and near
        once = say(", noise unknown") if few else ""
        slower = run.step_ms / first.step_ms - 1
        behind = say("within noise of it") if near else say("{slower:.1%} slower{once}", slower=slower, once=once)
        told.append(say("{name} {step_ms:.1f} ms ({behind})", name=series(run), step_ms=run.step_ms, behind=behind))
    return say(
        "N={nranks}: {name} is the fastest with {step_ms:.1f} ms a step; {others}."
        if clear
        else "N={nranks}: {name} has the lowest median, {step_ms:.1f} ms a step; {others}. Take any of them."
        if level
        else "N={nranks}: {name} has the lowest median, {step_ms:.1f} ms a step; {others}.",
        **winner,
        others=say(", ").join(told),
    )


def report(results: ScriptResults) -> Report:
    certificate = results.certificate
    digests = _digests(certificate)
    measured = _groups(results)
    blocks: list[Block] = [digests, *(Paragraph(line, muted=True) for line in why_not_all(results))]
    compared = _several(certificate) or certificate.against_paddle
    return Report(
        say("GradSync: your program under each scheme"),
        verdict(results),
        [
            Section.of(_step_times(measured)),
            Section(
                "",
                [Fold(say("Certificate: {bits}", bits=_outcome(certificate)), blocks, "good" if compared else "")],
            ),
            _figures(results, measured),
        ]
        if measured
        else [Section(say("Certificate"), [digests])] * bool(certificate.schemes),
        [environment(results)],
        failed=is_bad(results),
    )


def _digests(certificate: Certificate) -> Table:
    rows = [Row((name, Cell(sha[:12], "code"))) for name, sha in certificate.schemes.items()]
    return Table(say("Parameters at the end"), (say("contestant"), "sha256"), [rows])


def _figures(results: ScriptResults, measured: Sequence[tuple[int, list[ScriptRun]]]) -> Section:
    bodies = [[Row(cells(run, results.runs)) for run in runs] for _, runs in measured]
    figures = Table(say("Step times"), heads(results.runs), bodies, figures=True, wide=True)
    told = [Paragraph(line, muted=True) for line in (*notes(results.runs), noise_in_words())]
    return Section(say("Results"), [figures, *told])


def _step_times(measured: Sequence[tuple[int, list[ScriptRun]]]) -> Plot:
    runs = [run for _, group in measured for run in group]
    colours = colours_of(runs)
    groups = [BarGroup(f"N={n}", [_bar(run, colours[series(run)]) for run in group]) for n, group in measured]
    heard = say(", ").join(f"{run.contestant} {run.step_ms:.1f}" for run in runs)
    return Plot(
        "script-steps",
        say("Time of a step"),
        say(
            "Milliseconds from the end of one backward to the end of the next, on rank 0. Bars are medians over "
            "repetitions, lines are their intervals. Lower is better."
        ),
        say("Bars of milliseconds per step: {heard}.", heard=heard),
        [],
        Bars(groups),
    )


def _bar(run: ScriptRun, colour: str) -> Bar:
    time, (low, high) = f"{run.step_ms:.1f}", run.step_ms_interval
    words = f"{run.contestant}: {say('{time} ms a step', time=time)} ({low:.1f}–{high:.1f})"
    return Bar.single(series(run), f"{time} ms", run.step_ms, colour, words, interval=(low, high))


def heads(runs: Sequence[ScriptRun]) -> list[str]:
    """Of the table of step times."""
    against = [say("vs {rival}", rival=rival) for rival in rivals(runs)]
    return [say("contestant"), say("step ms"), say("interval"), *against, say("memory MB")]


def notes(runs: Sequence[ScriptRun]) -> list[str]:
    """What stands in the last columns of the table."""
    return [
        *(
            say(
                "vs {rival}: the time of its step over this one's, at the same N. Above 1 this one is faster.",
                rival=rival,
            )
            for rival in rivals(runs)
        ),
        say("memory MB: of rank 0 (PSS) after three steps, above that after its imports."),
    ]


def cells(run: ScriptRun, runs: Sequence[ScriptRun]) -> list[str]:
    """A run's line, in the order of `heads`."""
    interval = in_words(run.step_ms_interval, "{:.1f}".format)
    ratios = [speedup(run, runs, rival) for rival in rivals(runs)]
    return [run.contestant, f"{run.step_ms:.1f}", interval, *ratios, f"{run.memory_mb:,.0f}"]


def rivals(runs: Sequence[ScriptRun]) -> list[str]:
    """Those of Paddle's that ran: a column for another one would be empty."""
    return [scheme for scheme in PADDLE_SCHEMES if any(run.scheme == scheme for run in runs)]
