"""The report of a sweep (sweep.json): time against size for every backend, and how near its limit each comes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks.contestants.table_of_sweeps import OURS, is_encrypted, is_limit, plain_of
from benchmarks.page.charts import Line, Lines, Panel
from benchmarks.page.document import Bullets, Key, Paragraph, Plot, Report, Section, Table
from benchmarks.page.document import Row as Cells
from benchmarks.page.language import known, mark, say
from benchmarks.page.reasons import reason
from benchmarks.page.scales import logarithmic
from benchmarks.records.sweep import Row, ServerMemory, SweepResults
from benchmarks.reports.facts import cluster_in_words, environment, noise_in_words, too_few_rounds
from benchmarks.reports.runs import KNOWN
from benchmarks.stats.interval import LEAST_ROUNDS, in_words, three_digits
from benchmarks.stats.units import size_in_words

__all__ = ["TITLES", "WAITING", "cells", "nearest_to_limit", "report", "verdict", "wrong_backends"]

TITLES = {
    "all_reduce": mark("all_reduce, sum of float32"),
    "push_pull": mark("push_pull, a parameter server's round with SGD in float32"),
    "broadcast": mark("broadcast of float32 from rank 0"),
}
WAITING = mark("Largest share of a core that a rank uses while it waits for one that is {late:g} s late")
COOL = (KNOWN["ring/shm"], KNOWN["ring/tcp"], "#00906a", "#7a8b1f", KNOWN["local"])  # ours
WARM = (KNOWN["ps/shm"], "#aa4499", KNOWN["ps/shm S=2"], "#8c6d5a")  # other libraries


def verdict(results: SweepResults) -> list[str]:
    """For each number of ranks: the best of ours against the best of the others, and against the limit."""
    failed = [say("{name} failed: {why}.", name=name, why=reason(why)) for name, why in results.failed.items()]
    if wrong := wrong_backends(results):
        return [say("The sums are WRONG from {names}; no speed is shown.", names=say(", ").join(wrong)), *failed]
    count = sum(not is_limit(row.backend) for row in results.rows)
    checked = say("Every sum was right: {count} series, each checked before it was timed.", count=count)
    cut = [say("Interrupted: only a part of what was asked for was measured.")] if results.interrupted else []
    races = (line for n, rows in groups(results) for line in _race(n, rows))
    racing = [row for row in results.rows if row.backend in OURS or _is_rival(row)]
    few = too_few_rounds(min(map(_rounds, racing))) if any(map(_is_rival, racing)) else []
    return [checked, *cut, *races, *few, *failed]


def _is_rival(row: Row) -> bool:
    return row.backend not in (*OURS, "nccl-raw") and not is_limit(row.backend)


def wrong_backends(results: SweepResults) -> list[str]:
    return sorted({f"{row.backend} N={row.nranks}" for row in results.rows if row.wrong})


def groups(results: SweepResults) -> list[tuple[int, list[Row]]]:
    """The rows by number of ranks, without the link's; none if a sum was wrong."""
    rows = [] if wrong_backends(results) else [row for row in results.rows if row.backend != "link"]
    return [(n, [row for row in rows if row.nranks == n]) for n in sorted({row.nranks for row in rows})]


def _race(nranks: int, rows: Sequence[Row]) -> list[str]:
    ours = [row for row in rows if row.backend in OURS]
    others = [row for row in rows if _is_rival(row)]
    told, near = [], []
    for size in sorted({row.bytes for row in ours}):
        best = min((row for row in ours if row.bytes == size), key=_time)
        if best.of_limit:
            near.append((best.of_limit, size_in_words(size)))
        if rivals := [row for row in others if row.bytes == size]:
            told.append(f"{size_in_words(size)} {_against(best, min(rivals, key=_time))}")
    lines = []
    if told:
        lines.append(
            say(
                "N={nranks}, our best against the best other library: {sizes}.",
                nranks=nranks,
                sizes=say("; ").join(told),
            )
        )
    if near:
        reach = [say("{share:.0%} at {size}", share=share, size=size) for share, size in (min(near), max(near))]
        lines.append(
            say(
                "N={nranks}: our best reaches {least} to {most} of the machine's limit."
                if len(set(reach)) > 1
                else "N={nranks}: our best reaches {most} of the machine's limit.",
                nranks=nranks,
                least=reach[0],
                most=reach[1],
            )
        )
    lines += _costs_of_tls(nranks, rows)
    if told := [_memory(row, row.server_memory) for row in rows if row.server_memory]:
        lines.append(
            say(
                "N={nranks}, memory (PSS) of a server above its imports: {servers}.",
                nranks=nranks,
                servers=say("; ").join(told),
            )
        )
    return lines


def _costs_of_tls(nranks: int, rows: Sequence[Row]) -> list[str]:
    """Against the same in plain text, backend by backend and size by size."""
    plain = {(row.backend, row.bytes): row for row in rows}
    told = [
        say("{backend} {ratio:.2f} times at {size}", backend=each, ratio=row.time_ms / before.time_ms, size=size)
        for row in rows
        if is_encrypted(row.backend) and (before := plain.get((each := plain_of(row.backend), row.bytes)))
        for size in [size_in_words(row.bytes)]
    ]
    if not told:
        return []
    return [
        say(
            "N={nranks}, TLS takes so many times as long as plain text: {ratios}.",
            nranks=nranks,
            ratios=say("; ").join(told),
        )
    ]


def _memory(row: Row, of: ServerMemory) -> str:
    return say(
        "{backend} {pss:.0f} MB at {size} (its own {own:.0f}, limit {limit:.0f})",
        backend=row.backend,
        size=size_in_words(row.bytes),
        pss=of.pss,
        own=of.own,
        limit=of.limit,
    )


def nearest_to_limit(results: SweepResults) -> str:
    """Of the largest array: how near the best of ours comes to what the machine allows; "" if it is not known."""
    found = []
    for nranks, rows in groups(results):
        ours = [row for row in rows if row.backend in OURS and row.of_limit]
        largest = [row for row in ours if row.bytes == max(row.bytes for row in ours)]
        if largest:
            best = min(largest, key=_time)
            found.append(
                say(
                    "{share:.0%} of the machine's limit at {size} and N={nranks} ({backend})",
                    share=best.of_limit,
                    size=size_in_words(best.bytes),
                    nranks=nranks,
                    backend=best.backend,
                )
            )
    return say("{op} reaches {shares}", op=results.op, shares=say(", ").join(found)) if found else ""


def _time(row: Row) -> float:
    return float(row.time_ms)


def _against(best: Row, rival: Row) -> str:
    ours, theirs = best.time, rival.time
    if _few(best, rival):
        return say(
            "{ours} ms against {theirs} ms of {rival} (noise unknown)",
            ours=three_digits(ours.median),
            theirs=three_digits(theirs.median),
            rival=rival.backend,
        )
    if not ours.against(theirs):
        return say("within noise of {rival}", rival=rival.backend)
    ratio = rival.time_ms / best.time_ms
    times = max(ratio, 1 / ratio)
    return say(
        "{ratio} times faster than {rival}" if ratio > 1 else "{ratio} times slower than {rival}",
        ratio=f"{times:.2f}" if times < 1.095 else f"{times:.1f}",
        rival=rival.backend,
    )


def _rounds(row: Row) -> int:
    """Older results do not hold them; of one round the interval is a point."""
    return len(row.time_ms_rounds) or (1 if row.time.low == row.time.high else LEAST_ROUNDS)


def _few(*rows: Row) -> bool:
    return min(map(_rounds, rows)) < LEAST_ROUNDS


def report(results: SweepResults) -> Report:
    tables = [
        Section(
            say("{op} on {nranks} ranks, the figures", op=results.op, nranks=nranks),
            [
                Table(f"N={nranks}{_where(results)}", heads(), bodies_of(rows), figures=True, names=2, wide=True),
                *([] if number else [Paragraph(noise_in_words(), muted=True)]),
            ],
        )
        for number, (nranks, rows) in enumerate(groups(results))
    ]
    if results.waiting:
        tables.append(Section(say("What waiting costs"), [waiting(results)]))
    if absent := results.absent:
        lines = [say("{name} is absent: {why}.", name=name, why=reason(why)) for name, why in absent.items()]
        tables.append(Section(say("Not measured"), [Bullets(lines)]))
    return Report(
        f"GradSync: {known(TITLES[results.op])}{_where(results)}",
        verdict(results),
        [*map(Section.of, _plots(results)), *tables],
        [environment(results)],
        failed=bool(wrong_backends(results)),
    )


def _plots(results: SweepResults) -> list[Plot]:
    """One for each number of ranks."""
    backends = list(dict.fromkeys(row.backend for _, rows in groups(results) for row in rows))
    cool, warm = itertools.cycle(COOL), itertools.cycle(WARM)
    colours = {name: next(cool if name in OURS else warm) for name in backends if not is_limit(name)}
    return [_times(nranks, rows, colours, results.op) for nranks, rows in groups(results)]


def _times(nranks: int, rows: Sequence[Row], colours: dict[str, str], op: str) -> Plot:
    by_name = {
        name: sorted((row for row in rows if row.backend == name), key=lambda row: int(row.bytes))
        for name in dict.fromkeys(row.backend for row in rows)
    }
    lines = [_line(name, mine, colours.get(name, "var(--muted)")) for name, mine in by_name.items()]
    sizes = sorted({row.bytes for row in rows})
    times = [row.time_ms for row in rows]
    x = logarithmic(
        say("bytes on each rank"), 0.8 * min(sizes), 1.25 * max(sizes), [(s, size_in_words(s)) for s in sizes]
    )
    y = logarithmic("ms", 0.8 * min(times), 1.25 * max(times))
    heard = say("; ").join(f"{name} {say(', ').join(map(_point, mine))}" for name, mine in by_name.items())
    return Plot(
        f"sweep-{op}-{nranks}",
        say("{op} on {nranks} ranks", op=op, nranks=nranks),
        say(
            "Time of one call, until the last rank has ended it, against the size of the array, the median over "
            "rounds. Both scales are logarithmic. Cool colours are ours, dotted lines are the machine's limits. "
            "Lower is better."
        ),
        say("Lines of milliseconds over bytes, {nranks} ranks. {heard}.", nranks=nranks, heard=heard),
        [Key(name, line.colour, line.dash) for name, line in zip(by_name, lines, strict=True)],
        Lines([Panel("", lines, x, y)]),
    )


def _line(name: str, rows: Sequence[Row], colour: str) -> Line:
    points = [(row.bytes, row.time_ms) for row in rows]
    if is_limit(name):
        return Line(points, colour, [name], dash="dot")
    return Line(points, colour, [*map(_hover, rows)], marks=True)


def _point(row: Row) -> str:
    return say("{time:.3g} at {size}", time=_time(row), size=size_in_words(row.bytes))


def _hover(row: Row) -> str:
    low, high = row.time_ms_interval
    head = f"{row.backend}, {size_in_words(row.bytes)}: {row.time_ms:.3g} ms ({low:.3g}–{high:.3g})"
    share = [say("{share:.0%} of the limit", share=row.of_limit)] if row.of_limit else []
    return say(", ").join([head, f"busbw {row.busbw_gb_s:.3g} GB/s", *share])


def heads() -> list[str]:
    """Of the tables."""
    figures = [say("time ms"), say("interval"), "algbw GB/s", "busbw GB/s", say("of limit"), say("wrong")]
    return [say("bytes"), say("backend"), *figures]


def bodies_of(rows: Sequence[Row]) -> list[list[Cells]]:
    """The lines of each size."""
    sizes = list(dict.fromkeys(row.bytes for row in rows))
    return [[Cells([size_in_words(size), *cells(each)]) for each in rows if each.bytes == size] for size in sizes]


def _where(results: SweepResults) -> str:
    if not results.cluster:
        return ""
    return say(", emulated {cluster}", cluster=cluster_in_words(results.cluster))


def cells(row: Row) -> list[str]:
    """A row's line after its size, in the order of `heads`; without what makes no sense for a limit."""
    link = row.backend == "link"
    limit = is_limit(row.backend) and not link
    return [
        row.backend,
        three_digits(row.time_ms),
        in_words(row.time_ms_interval, three_digits),
        "" if limit else f"{row.algbw_gb_s:.3g}",
        "" if limit or link else f"{row.busbw_gb_s:.3g}",
        f"{row.of_limit:.0%}" if row.of_limit else "",
        "" if limit or link else str(row.wrong),
    ]


def waiting(results: SweepResults) -> Table:
    """What waiting costs: a line for each backend."""
    shares = {(row.backend, row.nranks): f"{row.core:.1%}" for row in results.waiting}
    counts = sorted({nranks for _, nranks in shares})
    backends = dict.fromkeys(backend for backend, _ in shares)
    lines = [Cells([name, *(shares.get((name, n), "") for n in counts)]) for name in backends]
    title = known(WAITING).format(late=results.waiting[0].late_s)
    return Table(title, (say("backend"), *(f"N={n}" for n in counts)), [lines], figures=True)
