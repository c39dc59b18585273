"""The report of a crossover map: where the ring wins and where the parameter server, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.flags.sweep import size_in_words
from benchmarks.page.html_page import page, plot_section, row, section, table, verdict_box
from benchmarks.page.language import known, mark, say
from benchmarks.page.plot import Key, Plot, axis, layout
from benchmarks.reports.compare import environment_table, noise_in_words
from benchmarks.reports.compare_figures import milliseconds
from benchmarks.reports.compare_page import environment_section
from benchmarks.stats.interval import in_words, measured

__all__ = ["plots", "print_terminal", "sections", "to_html", "to_markdown", "verdict", "winner"]

Results = dict[str, Any]  # what lies in crossover.json
Cell = dict[str, Any]  # one of its "cells"
Panel = tuple[tuple[int, int], list[Cell]]  # (number of ranks, of servers) and the cells, by size and then by link

SCHEMES = {"ring": mark("the ring"), "ps": mark("the parameter server")}
SHORT = {"ring": mark("ring"), "ps": mark("server"), "": "≈"}
# Cool is the ring, warm the parameter server; half transparent, so that the text stands out in both themes.
COOL, EVEN, WARM = "rgba(0,119,187,0.65)", "rgba(128,128,128,0.15)", "rgba(199,119,0,0.65)"
SCALE = [[0, COOL], [0.45, "rgba(0,119,187,0.15)"], [0.5, EVEN], [0.55, "rgba(199,119,0,0.15)"], [1, WARM]]
CPU_BOUND = 0.5  # of the bound; below it something else than the link sets the times
PLACES = mark(
    "Every rank has a host of its own, and server s is on rank s's host, so what those two exchange crosses no link. "
    "Both make a whole step of SGD, the ring's update on every rank, the servers' on theirs. As always over TCP, what "
    "is short (up to 4 MiB / N) goes straight to its reducers instead of round the ring."
)
BOUND = mark(
    "The bound is the least time for the bytes that must cross the busiest link, at the rate of a plain TCP stream "
    "that was measured in the same rounds; it supposes that push and pull overlap."
)


def winner(cell: Cell) -> str:
    """ "ring", "ps", or "" where the difference is within noise."""
    ring, server = (measured(cell[scheme], "time_ms") for scheme in ("ring", "ps"))
    return {-1: "ring", 0: "", 1: "ps"}[ring.against(server)]


def lead(cell: Cell) -> float:
    """How many times as long the slower one takes."""
    return float(max(cell["ratio"], 1 / cell["ratio"]))


def panels(results: Results) -> list[Panel]:
    cells = sorted(results["cells"], key=lambda c: (c["nranks"], c["servers"], c["bytes"], c["link_bytes_per_s"]))
    return [(key, list(found)) for key, found in groupby(cells, key=lambda c: (c["nranks"], c["servers"]))]


def name_of(key: tuple[int, int]) -> str:
    nranks, servers = key
    return say(
        "N={nranks}, {servers} servers" if servers > 1 else "N={nranks}, {servers} server",
        nranks=nranks,
        servers=servers,
    )


def heads() -> list[str]:
    """Of the tables."""
    ring, server = say("ring ms (min–max)"), say("server ms (min–max)")
    return [say("model"), say("link"), ring, say("of bound"), server, say("of bound"), say("faster")]


def verdict(results: Results) -> list[str]:
    """The outcome in plain sentences: all in all, then for each number of ranks and servers who wins from which link
    and size on and by how much, then where the link was not what set the times."""
    cells = results["cells"]
    won = [winner(cell) for cell in cells]
    tied = won.count("")
    overall = say(
        "A whole step of SGD between emulated hosts: the ring is faster in {ring} of {cases} cases, the parameter "
        "server in {ps}{noise}{once}.",
        ring=won.count("ring"),
        cases=len(cells),
        ps=won.count("ps") or say("none"),
        noise=say(", {tied} is within noise" if tied == 1 else ", {tied} are within noise", tied=tied) if tied else "",
        once=say("; each was measured once, so its noise is unknown") if results["repetitions"] < 2 else "",
    )
    cut = [say("Interrupted: only a part of what was asked for was measured.")] if results["interrupted"] else []
    return [overall, *cut, *map(_panel_verdict, panels(results)), *_other_limits(cells)]


def _panel_verdict(panel: Panel) -> str:
    key, cells = panel
    name = name_of(key)
    won = {winner(cell) for cell in cells}
    if len(won) == 1:
        return say("{name}: {wins} at every size and link measured.", name=name, wins=_wins(won.pop(), cells))
    rows = [list(row) for _, row in groupby(cells, key=lambda cell: cell["bytes"])]
    return say("{name}: {rows}.", name=name, rows=say("; ").join(map(_row_verdict, rows)))


def _row_verdict(cells: Sequence[Cell]) -> str:
    """One size, over its links: neighbours with one winner in one phrase."""
    phrases = ""
    for scheme, found in groupby(cells, key=winner):
        run = list(found)
        phrase = {"wins": _wins(scheme, run), "reach": _reach(run, cells)}
        phrases += say(", {wins} {reach}" if phrases else "{wins} {reach}", **phrase)
    return say("with {size} {phrases}", size=size_in_words(cells[0]["bytes"]), phrases=phrases)


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
    first, last = run[0]["link"], run[-1]["link"]
    if len(run) == len(cells):
        return say("on every link")
    if len(run) == 1:
        return say("at {link}", link=first)
    if run[-1] is cells[-1]:
        return say("from {first} on", first=first)
    return say("up to {last}" if run[0] is cells[0] else "from {first} to {last}", first=first, last=last)


def _other_limits(cells: Sequence[Cell]) -> list[str]:
    """Links at which nobody comes near what the link allows."""
    found = []
    for link, same in _by_link(cells):
        best = max(cell[scheme]["of_bound"] for cell in same for scheme in SCHEMES)
        if best < CPU_BOUND:
            found.append(
                say(
                    "At {link} no scheme reaches more than {best:.0%} of what the link allows (a plain stream carries "
                    "{stream}): there this machine's processors set the times, not the link.",
                    link=link,
                    best=best,
                    stream=_stream(same),
                )
            )
    return found


def _by_link(cells: Iterable[Cell]) -> list[tuple[str, list[Cell]]]:
    links = sorted(cells, key=lambda cell: cell["link_bytes_per_s"])
    return [(link, list(same)) for link, same in groupby(links, key=lambda cell: str(cell["link"]))]


def _stream(cells: Sequence[Cell]) -> str:
    """What a plain TCP stream carried, in all these cells."""
    rates = [8e-6 * cell["stream_bytes_per_s"] for cell in cells]
    few, most = f"{min(rates):,.0f}", f"{max(rates):,.0f}"
    return say("{most} Mbit/s" if few == most else "{few} to {most} Mbit/s", few=few, most=most)


def plots(results: Results) -> list[Plot]:
    """The map: a panel for each number of ranks and servers, links to the right, sizes upwards."""
    shown = panels(results)
    links = [link for link, _ in _by_link(results["cells"])]
    sizes = sorted({cell["bytes"] for cell in results["cells"]})
    most = max([1.0, *(abs(_depth(cell)) for cell in results["cells"])])
    look = layout(
        coloraxis={"cmin": -most, "cmax": most, "showscale": False, "colorscale": SCALE},
        annotations=[],
    )
    data = []
    title, height = 34, 46 * len(sizes)  # in pixels, of one panel
    whole = len(shown) * (title + height) + 40
    for number, (key, cells) in enumerate(shown):
        suffix = str(number + 1) if number else ""
        top = 1 - (number * (title + height) + title) / whole
        look[f"xaxis{suffix}"] = axis(anchor=f"y{suffix}", type="category", showticklabels=key == shown[-1][0])
        domain = [max(0.0, top - height / whole), top]
        look[f"yaxis{suffix}"] = axis(anchor=f"x{suffix}", type="category", domain=domain)
        words = {"text": f"<b>{name_of(key)}</b>", "xref": "paper", "yref": "paper", "showarrow": False}
        look["annotations"].append({**words, "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom"})
        data.append(_heat_map(cells, links, sizes, suffix))
    heard = say("; ").join(f"{name_of(key)}: {say(', ').join(map(_heard, cells))}" for key, cells in shown)
    ring, server, noise = say("ring faster"), say("parameter server faster"), say("≈ within noise")
    return [
        Plot(
            "crossover-map",
            say("Which scheme is faster, and how many times"),
            say(
                "A panel for each number of ranks N and of servers: links from slow to fast, sizes from small to "
                "large. The deeper the colour, the larger the lead; ≈ is within noise. {places}",
                places=known(PLACES),
            ),
            say("Heat maps of the faster scheme and its lead. {heard}.", heard=heard),
            [Key(ring, COOL), Key(server, WARM), Key(noise, EVEN)],
            whole,
            {"data": data, "layout": look},
        )
    ]


def _heat_map(cells: Sequence[Cell], links: Sequence[str], sizes: Sequence[int], suffix: str) -> dict[str, Any]:
    at = {(cell["bytes"], cell["link"]): cell for cell in cells}
    grid = [[at.get((size, link)) for link in links] for size in sizes]
    return {
        "type": "heatmap",
        "x": list(links),
        "y": [size_in_words(size) for size in sizes],
        "z": [[cell and _depth(cell) for cell in line] for line in grid],
        "text": [[_in_cell(cell) if cell else "" for cell in line] for line in grid],
        "customdata": [[_on_hover(cell) if cell else "" for cell in line] for line in grid],
        "texttemplate": "%{text}",
        "textfont": {"color": "var(--ink)", "size": 13},
        "hovertemplate": "%{customdata}<extra></extra>",
        "coloraxis": "coloraxis",
        "xaxis": f"x{suffix}",
        "yaxis": f"y{suffix}",
        "xgap": 3,
        "ygap": 3,
    }


def _depth(cell: Cell) -> float:
    """Of the colour: log2(ring / ps), but none for noise."""
    return math.log2(cell["ratio"]) if winner(cell) else 0.0


def _in_cell(cell: Cell) -> str:
    return f"{known(SHORT[winner(cell)])} {lead(cell):.2f}×"


def _heard(cell: Cell) -> str:
    size = size_in_words(cell["bytes"])
    return say("{size} at {link} {outcome}", size=size, link=cell["link"], outcome=_outcome(cell))


def _outcome(cell: Cell) -> str:
    return _in_cell(cell) if winner(cell) else say("within noise ({lead:.2f}×)", lead=lead(cell))


def _on_hover(cell: Cell) -> str:
    name = name_of((cell["nranks"], cell["servers"]))
    where = say("{name}, {size} at {link}", name=name, size=size_in_words(cell["bytes"]), link=cell["link"])
    times = [
        say(
            "{scheme}: {time} ms, {share:.0%} of the bound",
            scheme=known(words),
            time=_time(cell[scheme]),
            share=cell[scheme]["of_bound"],
        )
        for scheme, words in SCHEMES.items()
    ]
    return "<br>".join([where, *times, _outcome(cell)])


def _time(figure: dict[str, Any]) -> str:
    return f"{milliseconds(figure['time_ms'])} ({in_words(figure['time_ms_interval'], milliseconds)})"


def _cells(cell: Cell) -> list[str]:
    """A line of the table, in the order of `heads`."""
    figures = [text for s in SCHEMES for text in (_time(cell[s]), f"{cell[s]['of_bound']:.0%}")]
    return [size_in_words(cell["bytes"]), cell["link"], *figures, _outcome(cell)]


def _links(results: Results) -> list[str]:
    """What a plain stream carried over each link."""
    return [
        say(
            "{link}: a plain TCP stream carried {stream}, {share:.0%} of it or more.",
            link=link,
            stream=_stream(cells),
            share=min(cell["stream_bytes_per_s"] / cell["link_bytes_per_s"] for cell in cells),
        )
        for link, cells in _by_link(results["cells"])
    ]


def sections(results: Results) -> list[str]:
    """HTML for a page: the places of `plots`, the figures, and what the links carried."""
    tables = [
        table(name_of(key), heads(), [[row(map(escape, _cells(cell))) for cell in cells]], look="figures wide")
        for key, cells in panels(results)
    ]
    links = "".join(f"<li>{escape(line)}</li>" for line in _links(results))
    rounds = say("Medians over {rounds} rounds. {bound}", rounds=results["repetitions"], bound=known(BOUND))
    return [
        *map(plot_section, plots(results)),
        section(say("Times of a step"), f"<p>{escape(rounds)}</p>", f"<p>{escape(noise_in_words())}</p>", *tables),
        section(say("What the links carried"), f"<ul>{links}</ul>"),
    ]


def to_html(results: Results) -> str:
    """The whole report as a page."""
    box = verdict_box(verdict(results))
    title = say("GradSync: where a parameter server wins, and where a ring")
    return page(title, box, [*sections(results), environment_section(results)], plots(results))


def to_markdown(results: Results) -> str:
    """The whole report as Markdown, for a pull request."""
    lines = [f"## {say('GradSync crossover map')}", "", *(f"- {line}" for line in verdict(results))]
    lines += ["", known(PLACES), "", known(BOUND), "", noise_in_words()]
    for key, cells in panels(results):
        rule = "|---|---|" + "---:|" * (len(heads()) - 2)
        lines += ["", f"### {name_of(key)}", "", f"| {' | '.join(heads())} |", rule]
        lines += [f"| {' | '.join(_cells(cell))} |" for cell in cells]
    lines += ["", f"### {say('What the links carried')}", "", *(f"- {line}" for line in _links(results))]
    lines += ["", f"### {say('Environment')}", "", environment_table(results)]
    return "\n".join([*lines, "", "```console", results["command"], "```", ""])


def print_terminal(results: Results, console: Console) -> None:
    """The tables, for 80 columns or more, and the verdict."""
    for key, cells in panels(results):
        shown = Table(title=name_of(key), title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for number, head in enumerate(heads()):
            words = head.replace(" (", "\n").replace("of bound", "of\nbound").strip(")")
            shown.add_column(words, justify="left" if number < 2 else "right", overflow="fold")
        for cell in cells:
            shown.add_row(*_cells(cell)[:-1], _in_cell(cell))
        console.print(shown)
        console.print()
    console.print(Text("≈ within noise", style="dim"))
    for line in verdict(results):
        console.print(Text(line, style="bold"))
