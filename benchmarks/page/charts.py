"""The kinds of charts, as data: a page draws them in HTML and SVG, without a script.

Bars and heat maps are HTML, so that their text stays as large as the page's on every screen. Lines are one SVG whose
strokes keep their width however it is stretched; its labels are HTML as well. Colours are CSS, those of the page
`var(--name)`: it knows whether it is light or dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.page.scales import Axis

__all__ = [
    "OTHERS",
    "Bar",
    "BarGroup",
    "Bars",
    "HeatCell",
    "HeatMap",
    "HeatTable",
    "Line",
    "Lines",
    "Panel",
    "Segment",
]

WIDEST_TEXT = 25.0  # percent of a chart's width, that the text beside a bar takes on a narrow screen
# Apart for colour-blind eyes, and on white as on black.
OTHERS = ("#aa4499", "#00906a", "#7a8b1f", "#8c6d5a")


@dataclass(frozen=True)
class Segment:
    """A piece of a bar; `words` are shown while the pointer is on it."""

    value: float
    colour: str
    words: str


@dataclass(frozen=True)
class Bar:
    """
    Args:
        name: to its left.
        text: to its right.
        segments: one, or several that stand end to end.
        interval: shown as a line across its end.
        hatched: it is not a value but a limit that was not reached.
    """

    name: str
    text: str
    segments: Sequence[Segment]
    interval: tuple[float, float] | None = None
    hatched: bool = False

    @property
    def end(self) -> float:
        """Where its ink ends."""
        return max(sum(segment.value for segment in self.segments), *(self.interval or (0.0,)), 0.0)

    @staticmethod
    def single(
        name: str,
        text: str,
        value: float,
        colour: str,
        words: str,
        *,
        interval: tuple[float, float] | None = None,
        hatched: bool = False,
    ) -> Bar:
        return Bar(name, text, [Segment(value, colour, words)], interval, hatched)


@dataclass(frozen=True)
class BarGroup:
    """Under a heading; `mark` is a value at which a line crosses all its bars."""

    title: str
    bars: Sequence[Bar]
    mark: float | None = None


@dataclass(frozen=True)
class Bars:
    """Lying bars with one scale from 0."""

    template: ClassVar[str] = "bars.html"
    groups: Sequence[BarGroup]

    def text_at(self, bar: Bar, group: BarGroup) -> float:
        """Where the text beside a bar of a group begins, in percent: behind the line that crosses all of them, if that
        is so near that they would touch."""
        end, line = self.share(bar.end), self.share(group.mark or 0.0)
        return line if end < line < end + WIDEST_TEXT else end

    def share(self, value: float) -> float:
        """Its length in percent."""
        ends = [bar.end for group in self.groups for bar in group.bars]
        marks = [group.mark for group in self.groups if group.mark is not None]
        return round(100 * value / (max(ends + marks, default=0.0) or 1.0), 2)


@dataclass(frozen=True)
class Line:
    """
    Args:
        points: x and y; where y is no finite number, the line is cut.
        words: one text for each point, shown while the pointer is on its mark, or one for the whole line.
        band: x, the least and the greatest y.
    """

    points: Sequence[tuple[float, float]]
    colour: str
    words: Sequence[str]
    dash: str = "solid"  # or "dot"
    marks: bool = False
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Panel:
    """Lines over two axes; `level` is a y at which a dotted line crosses them."""

    title: str
    lines: Sequence[Line]
    x: Axis
    y: Axis
    level: float | None = None

    def path(self, line: Line) -> str:
        """SVG path data, in percent of the panel."""
        pen, found = "M", []
        for x, y in line.points:
            shown = self.x.shows(x) and self.y.shows(y)
            if shown:
                found.append(f"{pen}{self.at(x, y)}")
            pen = "L" if shown else "M"
        return "".join(found)

    def dots(self, line: Line) -> Iterator[tuple[str, str]]:
        """Where the marks are, and their words."""
        for (x, y), words in zip(line.points, line.words, strict=True):
            if self.x.shows(x) and self.y.shows(y):
                yield self.at(x, y), words

    def area(self, line: Line) -> str:
        """SVG path data of the band."""
        band = [point for point in line.band if all(map(self.y.shows, point[1:]))]
        around = [(x, high) for x, _, high in band] + [(x, low) for x, low, _ in reversed(band)]
        return f"M{'L'.join(self.at(x, y) for x, y in around)}Z" if around else ""

    def at(self, x: float, y: float) -> str:
        """SVG counts from the top."""
        return f"{self.x.place(x):g} {round(100 - self.y.place(y), 2):g}"


@dataclass(frozen=True)
class Lines:
    """Panels one below the other."""

    template: ClassVar[str] = "lines.html"
    panels: Sequence[Panel]


@dataclass(frozen=True)
class HeatCell:
    text: str
    colour: str
    words: str


@dataclass(frozen=True)
class HeatTable:
    """
    Args:
        corner: what the rows' heads are, and what the columns' are.
        rows: head and cells; None is a gap.
    """

    title: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[HeatCell | None]]]


@dataclass(frozen=True)
class HeatMap:
    """Tables of coloured cells."""

    template: ClassVar[str] = "heat_map.html"
    tables: Sequence[HeatTable]
