"""The report of a crossover map: where the ring wins and where the parameter server, and by how much."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from benchmarks.page.charts import HeatCell, HeatMap, HeatTable
from benchmarks.page.document import Bullets, Key, Paragraph, Plot, Report, Row, Section, Table
from benchmarks.page.language import known, mark, say
from benchmarks.records.crossover import Cell, CrossoverResults, Time
from benchmarks.reports.facts import environment, noise_in_words
from benchmarks.reports.runs import milliseconds
from benchmarks.stats.interval import in_words, three_digits
from benchmarks.stats.units import size_in_words

__all__ = ["cells_of", "heads", "in_cell", "name_of", "panels", "report", "verdict", "winner"]

Panel = list[Cell]  # of one number of ranks, of servers and their place, by size and then by link

SCHEMES = {"ring": mark("the ring"), "ps": mark("the parameter server")}
SHORT = {"ring": mark("ring"), "ps": mark("server"), "": "≈"}
# Cool is the ring, warm the parameter server; half transparent, so that the text stands out in both themes.
COOL, EVEN, WARM = "0,119,187", "128,128,128", "199,119,0"
FAR = 0.5  # of the bound; below it something else than the link sets the times
PLACES = mark(
    "Each rank has its own emulated host. Server s shares the host of rank s, so their traffic crosses no link, or has "
    "a further host of its own, where the panel says so. "
    "Both schemes make a whole step of SGD: the ring updates on every rank, the parameter server on its servers. "
    "Over TCP, arrays of up to 4 MiB / N go straight to their reducers instead of around the ring."
)
BOUND = mark(
    "The bound is the shortest possible time for the bytes that must cross the busiest link, at the speed of a "
    "plain TCP stream measured in the same rounds. It assumes that push and pull overlap."
)


def by_scheme(cell: Cell) -> dict[str, Time]:
    """By scheme."""
    return {"ring": cell.ring, "ps": cell.ps}


def winner(cell: Cell) -> str:
    """ "ring", "ps", or "" where the difference is within noise."""
    ring, server = cell.ring.time, cell.ps.time
    return {-1: "ring", 0: "", 1: "ps"}[ring.against(server)]


def lead(cell: Cell) -> float:
    """How many times as long the slower one takes."""
    return float(max(cell.ratio, 1 / cell.ratio))


def panels(results: CrossoverResults) -> list[Panel]:
    cells = sorted(results.cells, key=lambda c: (c.nranks, c.servers, c.apart, c.bytes, c.link_bytes_per_s))
    return [list(found) for _, found in groupby(cells, key=lambda c: (c.nranks, c.servers, c.apart))]


def name_of(cell: Cell) -> str:
    """Of its panel."""
    beside = say("{servers} servers" if cell.servers > 1 else "{servers} server", servers=cell.servers)
    apart = say(
        "{servers} on hosts of their own" if cell.servers > 1 else "{servers} on a host of its own", servers=beside
    )
    return say("N={nranks}, {servers}", nranks=cell.nranks, servers=apart if cell.apart else beside)


def heads() -> list[str]:
    """Of the tables."""
    ring, server = say("ring ms (min–max)"), say("server ms (min–max)")
    return [say("model"), say("link"), ring, say("of bound"), server, say("of bound"), say("faster")]


def verdict(results: CrossoverResults) -> list[str]:
    """The outcome in plain sentences: all in all, then for each panel who wins from which link and size on, by how much
    and why, then where the link was not what set the times."""
    cells = results.cells
    won = [winner(cell) for cell in cells]
    tied = won.count("")
    overall = say(
        "A whole step of SGD between emulated hosts: the ring is faster in {ring} of {cases} cases, the parameter "
        "server in {ps}{noise}{once}.",
        ring=won.count("ring"),
        cases=len(cells),
        ps=won.count("ps") or say("none"),
        noise=say(", {tied} is within noise" if tied == 1 else ", {tied} are within noise", tied=tied) if tied else "",
        once=say("; each was measured once, so its noise is unknown") if results.repetitions < 2 else "",
    )
    cut = [say("Interrupted: only a part of what was asked for was measured.")] if results.interrupted else []
    limited = _limited_elsewhere(cells)
    return [overall, *cut, *(_panel_verdict(panel, limited) for panel in panels(results)), *limited.values()]


def _panel_verdict(cells: Panel, limited: Collection[str]) -> str:
    """
    Args:
        limited: links at which nobody comes near their limit.
    """
    held_up = _held_up(cells, limited)
    return say("{wins} {bytes}{held_up}", wins=_who_wins(cells), bytes=_busiest(cells), held_up=held_up)


def _who_wins(cells: Panel) -> str:
    name = name_of(cells[0])
    won = {winner(cell) for cell in cells}
    if len(won) == 1:
        return say("{name}: {wins} at every size and link measured.", name=name, wins=_wins(won.pop(), cells))
    rows = [list(row) for _, row in groupby(cells, key=lambda cell: cell.bytes)]
    return say("{name}: {rows}.", name=name, rows=say("; ").join(map(_row_verdict, rows)))


def _row_verdict(cells: Sequence[Cell]) -> str:
    """One size, over its links: neighbours with one winner in one phrase."""
    phrases = ""
    for scheme, found in groupby(cells, key=winner):
        run = list(found)
        phrase = {"wins": _wins(scheme, run), "reach": _reach(run, cells)}
        phrases += say(", {wins} {reach}" if phrases else "{wins} {reach}", **phrase)
    return say("with {size} {phrases}", size=size_in_words(cells[0].bytes), phrases=phrases)


def _wins(scheme: str, cells: Sequence[Cell]) -> str:
    if not scheme:
        return say("both are within noise of each other")
    leads = sorted({f"{lead(cell):.2f}" for cell in cells}, key=float)
    return say(
        "{scheme} is {least} to {most} times faster" if len(leads) > 1 else "{scheme} is {most} times faster",
        scheme=known(SCHEMES[scheme]),
        least=leads[0],
        most=leads[-1],
    )


def _reach(run: Sequence[Cell], cells: Sequence[Cell]) -> str:
    """Where among the links these are."""
    first, last = run[0].link, run[-1].link
    if len(run) == len(cells):
        return say("on every link")
    if len(run) == 1:
        return say("at {link}", link=first)
    if run[-1] is cells[-1]:
        return say("from {first} on", first=first)
    return say("up to {last}" if run[0] is cells[0] else "from {first} to {last}", first=first, last=last)


def _busiest(cells: Panel) -> str:
    """What the busiest link must carry of the largest model: the bytes by which a scheme wins or loses."""
    largest = cells[-1]
    ring, servers = (
        three_digits(time.bound_ms * largest.stream_bytes_per_s / 1e9) for time in by_scheme(largest).values()
    )
    size = size_in_words(largest.bytes)
    if ring == servers:
        return say("Of {size}, the busiest link must carry {ring} MB each way in either scheme.", size=size, ring=ring)
    return say(
        "Of {size}, the busiest link must carry {ring} MB each way for the ring, {servers} MB for the servers.",
        size=size,
        ring=ring,
        servers=servers,
    )


def _held_up(cells: Panel, limited: Collection[str]) -> str:
    """Where a scheme loses that would win if it took half of its time or less, as its bytes allow."""
    found = ""
    for scheme, words in SCHEMES.items():
        far = [cell for cell in cells if cell.link not in limited and _waits(cell, scheme)]
        if far:
            found += say(
                " {where}, {scheme} loses with at most {most:.0%} of the link's limit: it waits for processors or "
                "for others, not for bytes.",
                where=_where(far, cells),
                scheme=known(words),
                most=max(by_scheme(cell)[scheme].of_bound for cell in far),
            )
    return found


def _waits(cell: Cell, scheme: str) -> bool:
    """Whether this scheme loses here, far from its bound, and not by its bytes."""
    won, mine = winner(cell), by_scheme(cell)[scheme]
    return won not in ("", scheme) and mine.of_bound < FAR and mine.bound_ms < by_scheme(cell)[won].time_ms


def _where(some: Sequence[Cell], cells: Panel) -> str:
    """Links, and sizes too unless every size of the panel is there: else a sentence would seem to speak of all."""
    links = {cell.link for cell in some}
    if len(some) == sum(cell.link in links for cell in cells):
        return say("At {links}", links=_links_in_words(some))
    sizes = groupby(some, key=lambda cell: cell.bytes)
    places = [
        say("{size} at {links}", size=size_in_words(size), links=_links_in_words(list(same))) for size, same in sizes
    ]
    return say("With {places}", places=say(" and with ").join(places))


def _links_in_words(cells: Iterable[Cell]) -> str:
    return say(", ").join(link for link, _ in _by_link(cells))


def _limited_elsewhere(cells: Sequence[Cell]) -> dict[str, str]:
    """By link at which nobody comes near what it allows, the sentence about it."""
    found = {}
    for link, same in _by_link(cells):
        best = max(by_scheme(cell)[scheme].of_bound for cell in same for scheme in SCHEMES)
        if best < FAR:
            found[link] = say(
                "At {link}, no scheme reaches more than {best:.0%} of the link's limit (a plain stream "
                "carries {stream}). There, this machine's processors are the bottleneck, not the link.",
                link=link,
                best=best,
                stream=_stream(same),
            )
    return found


def _by_link(cells: Iterable[Cell]) -> list[tuple[str, list[Cell]]]:
    links = sorted(cells, key=lambda cell: cell.link_bytes_per_s)
    return [(link, list(same)) for link, same in groupby(links, key=lambda cell: str(cell.link))]


def _stream(cells: Sequence[Cell]) -> str:
    """What a plain TCP stream carried, in all these cells."""
    rates = [8e-6 * cell.stream_bytes_per_s for cell in cells]
    few, most = f"{min(rates):,.0f}", f"{max(rates):,.0f}"
    return say("{most} Mbit/s" if few == most else "{few} to {most} Mbit/s", few=few, most=most)


def report(results: CrossoverResults) -> Report:
    rounds = say("Medians over {rounds} rounds. {bound}", rounds=results.repetitions, bound=known(BOUND))
    tables = [
        Table(name_of(cells[0]), heads(), [[Row(cells_of(cell)) for cell in cells]], figures=True, names=2, wide=True)
        for cells in panels(results)
    ]
    return Report(
        say("GradSync: where a parameter server wins, and where a ring"),
        verdict(results),
        [
            Section.of(_map(results)),
            Section(say("Times of a step"), [Paragraph(rounds), Paragraph(noise_in_words(), muted=True), *tables]),
            Section(say("What the links carried"), [Bullets(_links(results))]),
        ],
        [environment(results)],
    )


def _map(results: CrossoverResults) -> Plot:
    """A table for each panel, links to the right, sizes upwards."""
    shown = panels(results)
    most = max([1.0, *(abs(_depth(cell)) for cell in results.cells)])
    heard = say("; ").join(f"{name_of(cells[0])}: {say(', ').join(map(_heard, cells))}" for cells in shown)
    ring, server, noise = say("ring faster"), say("parameter server faster"), say("≈ within noise")
    return Plot(
        "crossover-map",
        say("Which scheme is faster, and how many times"),
        say(
            "One panel for each number of ranks N and of servers, and their place. Links go from slow to fast, sizes"
            " from small to large. The deeper the colour, the larger the lead; ≈ is within noise. {places}",
            places=known(PLACES),
        ),
        say("Heat maps of the faster scheme and its lead. {heard}.", heard=heard),
        [Key(ring, _shade(COOL, 0.65)), Key(server, _shade(WARM, 0.65)), Key(noise, _shade(EVEN, 0.35))],
        HeatMap([_heat_table(cells, results, most) for cells in shown]),
    )


def _heat_table(cells: Panel, results: CrossoverResults, most: float) -> HeatTable:
    links = [link for link, _ in _by_link(results.cells)]
    sizes = sorted({cell.bytes for cell in results.cells})
    at = {(cell.bytes, cell.link): cell for cell in cells}
    rows = [(size_in_words(size), [_heat_cell(at.get((size, link)), most) for link in links]) for size in sizes]
    return HeatTable(name_of(cells[0]), say("model"), links, rows)


def _heat_cell(cell: Cell | None, most: float) -> HeatCell | None:
    return HeatCell(in_cell(cell), _colour(cell, most), _on_hover(cell)) if cell else None


def _colour(cell: Cell, most: float) -> str:
    """Half transparent, so that the text stands out in both themes."""
    depth = _depth(cell)
    if not winner(cell):
        return _shade(EVEN, 0.15)
    return _shade(COOL if depth < 0 else WARM, 0.15 + 0.5 * abs(depth) / most)


def _shade(colour: str, opacity: float) -> str:
    return f"rgba({colour},{opacity:.2f})"


def _depth(cell: Cell) -> float:
    """Of the colour: log2(ring / ps), but none for noise."""
    return math.log2(cell.ratio) if winner(cell) else 0.0


def in_cell(cell: Cell) -> str:
    return f"{known(SHORT[winner(cell)])} {lead(cell):.2f}×"


def _heard(cell: Cell) -> str:
    size = size_in_words(cell.bytes)
    return say("{size} at {link} {outcome}", size=size, link=cell.link, outcome=_outcome(cell))


def _outcome(cell: Cell) -> str:
    return in_cell(cell) if winner(cell) else say("within noise ({lead:.2f}×)", lead=lead(cell))


def _on_hover(cell: Cell) -> str:
    where = say("{name}, {size} at {link}", name=name_of(cell), size=size_in_words(cell.bytes), link=cell.link)
    times = [
        say(
            "{scheme}: {time} ms, {share:.0%} of the bound",
            scheme=known(words),
            time=_time(by_scheme(cell)[scheme]),
            share=by_scheme(cell)[scheme].of_bound,
        )
        for scheme, words in SCHEMES.items()
    ]
    return "\n".join([where, *times, _outcome(cell)])


def _time(figure: Time) -> str:
    return f"{milliseconds(figure.time_ms)} ({in_words(figure.time_ms_interval, milliseconds)})"


def cells_of(cell: Cell) -> list[str]:
    """A line of the table, in the order of `heads`."""
    figures = [text for each in (cell.ring, cell.ps) for text in (_time(each), f"{each.of_bound:.0%}")]
    return [size_in_words(cell.bytes), cell.link, *figures, _outcome(cell)]


def _links(results: CrossoverResults) -> list[str]:
    """What a plain stream carried over each link."""
    return [
        say(
            "{link}: a plain TCP stream carried {stream}, {share:.0%} of it or more.",
            link=link,
            stream=_stream(cells),
            share=min(cell.stream_bytes_per_s / cell.link_bytes_per_s for cell in cells),
        )
        for link, cells in _by_link(results.cells)
    ]
