"""Plain SVG pictures: bars, lines over sizes and a shaded grid, readable in light and dark and in black and white."""

from __future__ import annotations

import math
from html import escape

__all__ = ["COLOURS", "bars", "grid", "lines"]

# Okabe and Ito's colours, told apart under every common colour blindness.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a8a8a", "#e69f00"]
FONT = "font-family='system-ui, sans-serif' font-size='13'"
STYLE = "<style>.chart{color:#1f2328}@media(prefers-color-scheme:dark){.chart{color:#d7dce2}}</style>"
LINE, FAINT = "stroke='currentColor' stroke-opacity='0.35'", "stroke='currentColor' stroke-opacity='0.13'"


def bars(groups: list[tuple[str, list[float]]], series: list[str], *, unit: str, line: float | None = None) -> str:
    """Horizontal bars, one group a label, with the value at each; a dashed line at `line`."""
    label, width, height, gap = 190, 430, 17, 14
    top = 34
    scale = width / max(line or 0.0, *(value for _, values in groups for value in values))
    body, y = [_legend(series, label)], top
    for name, values in groups:
        middle = y + height * len(values) / 2
        body.append(_text(label - 10, middle + 4, name, anchor="end"))
        for value, colour in zip(values, COLOURS, strict=False):
            body.append(
                f"<rect x='{label}' y='{y}' width='{value * scale:.1f}' height='{height - 2}' fill='{colour}'/>"
            )
            end = value if line is None or not 0 <= (line - value) * scale < 50 else line  # not across the line
            body.append(_text(label + end * scale + 6, y + height - 5, _short(value) + unit, size=12))
            y += height
        y += gap
    if line is not None:
        at = label + line * scale
        body.append(f"<path d='M{at:.1f} {top - 6}V{y - gap + 4}' stroke='currentColor' stroke-dasharray='4 3'/>")
    return _picture(label + width + 70, y, body)


def lines(panels: list[tuple[str, dict[str, list[float]]]], ticks: list[str], *, unit: str) -> str:
    """Lines of milliseconds over sizes, logarithmic upwards, one panel a title."""
    width, height, left, top = (290 if len(panels) > 1 else 570), 250, 78, 58
    values = [value for _, curves in panels for curve in curves.values() for value in curve]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    body = [_legend(list(panels[0][1]), left)]
    for place, (title, curves) in enumerate(panels):
        x0 = left + place * (width + 26)
        body.append(_text(x0 + width / 2, top - 10, title, anchor="middle", weight="600"))
        for power in range(low, high + 1):
            y = top + height * (high - power) / (high - low)
            body.append(f"<path d='M{x0} {y:.1f}h{width}' {FAINT}/>")
            if place == 0:
                body.append(_text(x0 - 8, y + 4, f"{10.0**power:g}{unit}", anchor="end", size=12))
        steps = [x0 + 20 + index * (width - 40) / (len(ticks) - 1) for index in range(len(ticks))]
        for x, tick in zip(steps, ticks, strict=True):
            body.append(_text(x, top + height + 20, tick, anchor="middle", size=12))
        for curve, colour, dash in zip(curves.values(), COLOURS, ["", "7 3", "2 3", "9 3 2 3", "14 3"], strict=False):
            points = [
                (x, top + height * (high - math.log10(value)) / (high - low))
                for x, value in zip(steps, curve, strict=True)
            ]
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            body.append(
                f"<path d='M{path}' fill='none' stroke='{colour}' stroke-width='2.5' stroke-dasharray='{dash}'/>"
            )
            body += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{colour}'/>" for x, y in points]
    return _picture(left + len(panels) * (width + 26), top + height + 30, body)


def grid(rows: list[str], columns: list[str], cells: list[list[tuple[str, float]]]) -> str:
    """A table of words, each on a ground that is the darker, the larger its number, of another colour below 0."""
    left, top, width, height = 250, 30, 110, 32
    body = [
        _text(left + (place + 0.5) * width, top - 10, name, anchor="middle", weight="600")
        for place, name in enumerate(columns)
    ]
    most = max(abs(depth) for row in cells for _, depth in row)
    for line, (name, row) in enumerate(zip(rows, cells, strict=True)):
        y = top + line * height
        body.append(_text(left - 10, y + 21, name, anchor="end"))
        for place, (words, depth) in enumerate(row):
            colour = COLOURS[0 if depth < 0 else 1] if depth else COLOURS[4]
            shade = 0.12 + 0.45 * abs(depth) / most
            x = left + place * width
            body.append(
                f"<rect x='{x + 1}' y='{y + 1}' width='{width - 2}' height='{height - 2}' rx='3' "
                f"fill='{colour}' fill-opacity='{shade:.2f}'/>"
            )
            body.append(_text(x + width / 2, y + 21, words, anchor="middle"))
    return _picture(left + len(columns) * width + 10, top + len(rows) * height + 6, body)


def _legend(names: list[str], left: float) -> str:
    found, x = [], left
    for name, colour in zip(names, COLOURS, strict=False):
        found.append(f"<rect x='{x:.0f}' y='8' width='12' height='12' fill='{colour}'/>" + _text(x + 18, 18.5, name))
        x += 40 + 7.4 * len(name)
    return "".join(found)


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, weight: str = "400") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='{size}' font-weight='{weight}' "
        f"fill='currentColor'>{escape(words)}</text>"
    )


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def _picture(width: float, height: float, body: list[str]) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' class='chart' role='img' viewBox='0 0 {width:.0f} {height:.0f}' "
        f"width='{width:.0f}' {FONT}>\n{STYLE}\n" + "\n".join(body) + "\n</svg>\n"
    )
