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

from benchmarks.figures import milliseconds
from benchmarks.html_page import page, plot_section, row, section, table, verdict_box
from benchmarks.html_report import environment_section
from benchmarks.plot import Key, Plot, axis, layout
from benchmarks.report import environment
from benchmarks.sweep_config import size_in_words

__all__ = ["plots", "print_terminal", "sections", "to_html", "to_markdown", "verdict", "winner"]

Results = dict[str, Any]  # what lies in crossover.json
Cell = dict[str, Any]  # one of its "cells"
Panel = tuple[tuple[int, int], list[Cell]]  # (number of ranks, of servers) and the cells, by size and then by link

TITLE = "GradSync: where a parameter server wins, and where a ring"
SCHEMES = {"ring": "the ring", "ps": "the parameter server"}
SHORT = {"ring": "ring", "ps": "server", "": "≈"}
# Cool is the ring, warm the parameter server; half transparent, so that the text stands out in both themes.
COOL, EVEN, WARM = "rgba(0,119,187,0.65)", "rgba(128,128,128,0.15)", "rgba(199,119,0,0.65)"
SCALE = [[0, COOL], [0.45, "rgba(0,119,187,0.15)"], [0.5, EVEN], [0.55, "rgba(199,119,0,0.15)"], [1, WARM]]
CPU_BOUND = 0.5  # of the bound; below it something else than the link sets the times
HEADS = ("model", "link", "ring ms (min–max)", "of bound", "server ms (min–max)", "of bound", "faster")
PLACES = (
    "Every rank has a host of its own, and server s is on rank s's host, so what those two exchange crosses no link. "
    "Both make a whole step of SGD, the ring's update on every rank, the servers' on theirs. As always over TCP, what "
    "is short (up to 4 MiB / N) goes straight to its reducers instead of round the ring."
)
BOUND = (
    "The bound is the least time for the bytes that must cross the busiest link, at the rate of a plain TCP stream "
    "that was measured in the same rounds; it supposes that push and pull overlap."
)


def winner(cell: Cell) -> str:
    """ "ring", "ps", or "" where the spreads over rounds overlap."""
    (low, high), (other_low, other_high) = (cell[scheme]["time_ms_interval"] for scheme in SCHEMES)
    if low <= other_high and other_low <= high:
        return ""
    return "ring" if cell["ratio"] < 1 else "ps"


def lead(cell: Cell) -> float:
    """How many times as long the slower one takes."""
    return float(max(cell["ratio"], 1 / cell["ratio"]))


def panels(results: Results) -> list[Panel]:
    cells = sorted(results["cells"], key=lambda c: (c["nranks"], c["servers"], c["bytes"], c["link_bytes_per_s"]))
    return [(key, list(found)) for key, found in groupby(cells, key=lambda c: (c["nranks"], c["servers"]))]


def name_of(key: tuple[int, int]) -> str:
    return f"N={key[0]}, {key[1]} server{'s' if key[1] > 1 else ''}"


def verdict(results: Results) -> list[str]:
    """The outcome in plain sentences: all in all, then for each number of ranks and servers who wins from which link
    and size on and by how much, then where the link was not what set the times."""
    cells = results["cells"]
    won = [winner(cell) for cell in cells]
    counts = f"the ring is faster in {won.count('ring')} of {len(cells)} cases, the parameter server in"
    overall = f"A whole step of SGD between emulated hosts: {counts} {won.count('ps') or 'none'}"
    noise = f", {won.count('')} {'is' if won.count('') == 1 else 'are'} within noise" if "" in won else ""
    once = "; each was measured once, so its noise is unknown" if results["repetitions"] < 2 else ""
    cut = ["Interrupted: only a part of what was asked for was measured."] if results["interrupted"] else []
    return [f"{overall}{noise}{once}.", *cut, *map(_panel_verdict, panels(results)), *_other_limits(cells)]


def _panel_verdict(panel: Panel) -> str:
    key, cells = panel
    name = name_of(key)
    won = {winner(cell) for cell in cells}
    if len(won) == 1:
        return f"{name}: {_wins(won.pop(), cells)} at every size and link measured."
    rows = [list(row) for _, row in groupby(cells, key=lambda cell: cell["bytes"])]
    return f"{name}: {'; '.join(map(_row_verdict, rows))}."


def _row_verdict(cells: Sequence[Cell]) -> str:
    """One size, over its links: neighbours with one winner in one phrase."""
    runs = [list(run) for _, run in groupby(cells, key=winner)]
    phrases = [f"{_wins(winner(run[0]), run)} {_reach(run, cells)}" for run in runs]
    return f"with {size_in_words(cells[0]['bytes'])} {', '.join(phrases)}"


def _wins(scheme: str, cells: Sequence[Cell]) -> str:
    if not scheme:
        return "both are within noise of each other"
    leads = sorted({f"{lead(cell):.2f}" for cell in cells}, key=float)
    return f"{SCHEMES[scheme]} is {' to '.join(dict.fromkeys((leads[0], leads[-1])))} times faster"


def _reach(run: Sequence[Cell], cells: Sequence[Cell]) -> str:
    """Where among the links these are."""
    if len(run) == len(cells):
        return "on every link"
    if len(run) == 1:
        return f"at {run[0]['link']}"
    if run[-1] is cells[-1]:
        return f"from {run[0]['link']} on"
    return f"up to {run[-1]['link']}" if run[0] is cells[0] else f"from {run[0]['link']} to {run[-1]['link']}"


def _other_limits(cells: Sequence[Cell]) -> list[str]:
    """Links at which nobody comes near what the link allows."""
    found = []
    for link, same in _by_link(cells):
        best = max(cell[scheme]["of_bound"] for cell in same for scheme in SCHEMES)
        if best < CPU_BOUND:
            found.append(
                f"At {link} no scheme reaches more than {best:.0%} of what the link allows (a plain stream carries "
                f"{_stream(same)}): there this machine's processors set the times, not the link."
            )
    return found


def _by_link(cells: Iterable[Cell]) -> list[tuple[str, list[Cell]]]:
    links = sorted(cells, key=lambda cell: cell["link_bytes_per_s"])
    return [(link, list(same)) for link, same in groupby(links, key=lambda cell: str(cell["link"]))]


def _stream(cells: Sequence[Cell]) -> str:
    """What a plain TCP stream carried, in all these cells."""
    rates = [8e-6 * cell["stream_bytes_per_s"] for cell in cells]
    few, most = f"{min(rates):,.0f}", f"{max(rates):,.0f}"
    return f"{few if few == most else f'{few} to {most}'} Mbit/s"


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
    heard = "; ".join(f"{name_of(key)}: {', '.join(map(_heard, cells))}" for key, cells in shown)
    return [
        Plot(
            "crossover-map",
            "Which scheme is faster, and how many times",
            "A panel for each number of ranks N and of servers: links from slow to fast, sizes from small to large. "
            f"The deeper the colour, the larger the lead; ≈ is within noise. {PLACES}",
            f"Heat maps of the faster scheme and its lead. {heard}.",
            [Key("ring faster", COOL), Key("parameter server faster", WARM), Key("≈ within noise", EVEN)],
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
    return f"{SHORT[winner(cell)]} {lead(cell):.2f}×"


def _heard(cell: Cell) -> str:
    return f"{size_in_words(cell['bytes'])} at {cell['link']} {_outcome(cell)}"


def _outcome(cell: Cell) -> str:
    scheme = winner(cell)
    return f"{SHORT[scheme]} {lead(cell):.2f}×" if scheme else f"within noise ({lead(cell):.2f}×)"


def _on_hover(cell: Cell) -> str:
    where = f"{name_of((cell['nranks'], cell['servers']))}, {size_in_words(cell['bytes'])} at {cell['link']}"
    times = [f"{SCHEMES[s]}: {_time(cell[s])} ms, {cell[s]['of_bound']:.0%} of the bound" for s in SCHEMES]
    return "<br>".join([where, *times, _outcome(cell)])


def _time(figure: dict[str, Any]) -> str:
    low, high = figure["time_ms_interval"]
    return f"{milliseconds(figure['time_ms'])} ({milliseconds(low)}–{milliseconds(high)})"


def _cells(cell: Cell) -> list[str]:
    """A line of the table, in the order of HEADS."""
    figures = [text for s in SCHEMES for text in (_time(cell[s]), f"{cell[s]['of_bound']:.0%}")]
    return [size_in_words(cell["bytes"]), cell["link"], *figures, _outcome(cell)]


def _links(results: Results) -> list[str]:
    """What a plain stream carried over each link."""
    return [
        f"{link}: a plain TCP stream carried {_stream(cells)}, "
        f"{min(cell['stream_bytes_per_s'] / cell['link_bytes_per_s'] for cell in cells):.0%} of it or more."
        for link, cells in _by_link(results["cells"])
    ]


def sections(results: Results) -> list[str]:
    """HTML for a page: the places of `plots`, the figures, and what the links carried."""
    tables = [
        table(name_of(key), HEADS, [[row(map(escape, _cells(cell))) for cell in cells]], look="figures wide")
        for key, cells in panels(results)
    ]
    links = "".join(f"<li>{escape(line)}</li>" for line in _links(results))
    rounds = f"Medians over {results['repetitions']} rounds. {BOUND}"
    return [
        *map(plot_section, plots(results)),
        section("Times of a step", f"<p>{escape(rounds)}</p>", *tables),
        section("What the links carried", f"<ul>{links}</ul>"),
    ]


def to_html(results: Results) -> str:
    """The whole report as a page."""
    box = verdict_box(verdict(results))
    return page(TITLE, box, [*sections(results), environment_section(results)], plots(results))


def to_markdown(results: Results) -> str:
    """The whole report as Markdown, for a pull request."""
    lines = ["## GradSync crossover map", "", *(f"- {line}" for line in verdict(results)), "", PLACES, "", BOUND]
    for key, cells in panels(results):
        rule = "|---|---|" + "---:|" * (len(HEADS) - 2)
        lines += ["", f"### {name_of(key)}", "", f"| {' | '.join(HEADS)} |", rule]
        lines += [f"| {' | '.join(_cells(cell))} |" for cell in cells]
    facts = [f"- {name}: {value}" for name, value in environment(results)]
    lines += ["", "### Links", "", *(f"- {line}" for line in _links(results)), "", "### Environment", "", *facts]
    return "\n".join([*lines, "", "```console", results["command"], "```", ""])


def print_terminal(results: Results, console: Console) -> None:
    """The tables, for 80 columns or more, and the verdict."""
    for key, cells in panels(results):
        shown = Table(title=name_of(key), title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for number, head in enumerate(HEADS):
            words = head.replace(" (", "\n").replace("of bound", "of\nbound").strip(")")
            shown.add_column(words, justify="left" if number < 2 else "right", overflow="fold")
        for cell in cells:
            shown.add_row(*_cells(cell)[:-1], _in_cell(cell))
        console.print(shown)
        console.print()
    console.print(Text("≈ within noise", style="dim"))
    for line in verdict(results):
        console.print(Text(line, style="bold"))
