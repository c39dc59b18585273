"""A plot as a Plotly dict with its words, and the look that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["DASHES", "OTHERS", "Key", "Plot", "axis", "layout", "plain"]

# Apart for colour-blind eyes, and on white as on black.
OTHERS = ("#aa4499", "#00906a", "#7a8b1f", "#8c6d5a")
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Key:
    """One entry of a legend: a filled box, or a line where a dash is given."""

    label: str
    colour: str
    dash: str | None = None


@dataclass(frozen=True)
class Plot:
    """A plot with its words: `alt` says in a sentence what it shows. `height` in CSS pixels.

    Colours of the page (text, lines, surface) appear as var(--name): the page knows which theme is on.
    """

    name: str
    title: str
    caption: str
    alt: str
    legend: list[Key]
    height: int
    figure: dict[str, Any]


def plain(name: str) -> str:
    """A name for Plotly, which would read tags and %{...} in it."""
    return name.replace("&", "&amp;").replace("<", "&lt;").replace("%{", "% {")


def axis(*, grid: bool = False, title: str = "", **settings: Any) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 12},
        "showgrid": grid,
        "gridcolor": "var(--line)",
        "zeroline": False,
        "separatethousands": True,
        "ticks": "outside",
        "ticklen": 6,
        "tickcolor": "rgba(0,0,0,0)",  # only the distance of the labels is wanted
        "fixedrange": True,  # a finger that drags is scrolling the page
        "automargin": True,
        **settings,
    }


def layout(**settings: Any) -> dict[str, Any]:
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "var(--ink)"},
        "hoverlabel": {"bgcolor": "var(--page)", "bordercolor": "var(--line)", "font": {"color": "var(--ink)"}},
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "showlegend": False,
        "dragmode": False,
        **settings,
    }
