"""What a report consists of, whatever it is written as: a verdict, and sections of paragraphs, tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from benchmarks.page.charts import Bars, HeatMap, Lines

__all__ = [
    "Block",
    "Bullets",
    "Cell",
    "Chapter",
    "Command",
    "Definitions",
    "Fold",
    "Key",
    "Paragraph",
    "Plot",
    "Report",
    "Row",
    "Section",
    "Table",
    "plots_of",
]

# Every string here is plain text: what writes it as HTML or Markdown escapes it.


class Cell(NamedTuple):
    """Of a table, with a look: "good", "bad", "muted" or "code"."""

    text: str
    look: str


class Row(NamedTuple):
    """Of a table; its first cell is its head."""

    cells: Sequence[str | Cell]
    strong: bool = False


class Key(NamedTuple):
    """One entry of a legend: a filled box, or a line where a dash, "solid" or "dot", is given."""

    label: str
    colour: str
    dash: str = ""


@dataclass(frozen=True)
class Paragraph:
    template: ClassVar[str] = "paragraph.html"
    text: str
    muted: bool = False


@dataclass(frozen=True)
class Bullets:
    template: ClassVar[str] = "bullets.html"
    lines: Sequence[str]


@dataclass(frozen=True)
class Definitions:
    template: ClassVar[str] = "definitions.html"
    meanings: dict[str, str]


@dataclass(frozen=True)
class Command:
    """Of a shell."""

    template: ClassVar[str] = "command.html"
    text: str


@dataclass(frozen=True)
class Table:
    """In a head, what follows a line break is its unit or detail.

    Args:
        bodies: groups of rows, told apart by a line.
        figures: all columns but the first hold numbers,
        names: or all but these.
        wide: as wide as the page.
    """

    template: ClassVar[str] = "table.html"
    caption: str
    heads: Sequence[str]
    bodies: Sequence[Sequence[Row]]
    figures: bool = False
    names: int = 1
    wide: bool = False


@dataclass(frozen=True)
class Plot:
    """A chart with its words: `alt` says in a sentence what it shows."""

    template: ClassVar[str] = "plot.html"
    name: str
    title: str
    caption: str
    alt: str
    legend: Sequence[Key]
    chart: Bars | Lines | HeatMap


@dataclass(frozen=True)
class Fold:
    """One line, and behind a click the rest.

    Args:
        look: of the line, "good" or "bad".
    """

    template: ClassVar[str] = "fold.html"
    summary: str
    blocks: Sequence[Block]
    look: str = ""


Block = Paragraph | Bullets | Definitions | Command | Table | Plot | Fold


@dataclass(frozen=True)
class Section:
    """Without a title it belongs to what stands before it."""

    title: str
    blocks: Sequence[Block]

    @staticmethod
    def of(plot: Plot) -> Section:
        return Section(plot.title, [plot])


@dataclass(frozen=True)
class Chapter:
    """One part of a larger report.

    Args:
        name: its address on the page.
        about: what was measured, in a line.
    """

    name: str
    title: str
    verdict: Sequence[str]
    sections: Sequence[Section]
    about: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Report:
    """
    Args:
        about: what was measured, in a line.
        verdict: the outcome in sentences.
        failed: the certificate failed.
        sections: the picture that shows the verdict first.
        chapters: the parts of a larger report.
        appendix: what a part of a larger report does without: how to read it, and the environment.
    """

    title: str
    verdict: Sequence[str]
    sections: Sequence[Section]
    appendix: Sequence[Section]
    about: str = ""
    failed: bool = False
    chapters: Sequence[Chapter] = ()


def plots_of(sections: Sequence[Section]) -> list[Plot]:
    return [block for section in sections for block in section.blocks if isinstance(block, Plot)]
