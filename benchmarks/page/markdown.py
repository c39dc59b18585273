"""A report in Markdown, without its plots; text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape as escape_html

from benchmarks.page.document import (
    Block,
    Bullets,
    Command,
    Definitions,
    Fold,
    Paragraph,
    Plot,
    Report,
    Section,
    Table,
)
from benchmarks.page.language import say

__all__ = ["bullets", "escape", "row", "table", "to_markdown"]


def to_markdown(report: Report) -> str:
    """The whole report, for a pull request; the parts of a larger one are folded away."""
    return "\n\n".join(_paragraphs(report)) + "\n"


def _paragraphs(report: Report) -> Iterator[str]:
    yield f"# {escape(report.title)}"
    yield bullets(report.verdict)
    if report.about:
        yield escape(report.about)
    yield from _sections(report.sections, "##")
    for chapter in report.chapters:
        yield f"## {escape(chapter.title)}"
        yield bullets(chapter.verdict)
        if chapter.about:
            yield escape(chapter.about)
        if inside := "\n\n".join(_sections(chapter.sections, "###")):
            yield _folded(say("{title} in figures", title=chapter.title), inside)
    yield from _sections(report.appendix, "##")


def _sections(sections: Iterable[Section], level: str) -> Iterator[str]:
    for section in sections:
        if told := [text for block in section.blocks if (text := _block(block))]:
            if section.title:
                yield f"{level} {escape(section.title)}"
            yield from told


def _block(block: Block) -> str:
    """Empty for a plot: its figures are in a table."""
    match block:
        case Paragraph():
            return escape(block.text)
        case Bullets():
            return bullets(block.lines)
        case Definitions():
            return bullets(f"{term}: {meaning}" for term, meaning in block.meanings.items())
        case Command():
            return f"```console\n{block.text}\n```"
        case Table():
            return _table(block)
        case Fold():
            return _folded(block.summary, "\n\n".join(filter(None, map(_block, block.blocks))))
        case Plot():
            return ""


def _folded(summary: str, text: str) -> str:
    return f"<details><summary>{escape_html(summary)}</summary>\n\n{text}\n\n</details>"


def _table(block: Table) -> str:
    rows = [
        row((cell if isinstance(cell, str) else cell.text for cell in line.cells), strong=line.strong)
        for body in block.bodies
        for line in body
    ]
    return f"{escape(block.caption)}\n\n{table(block.heads, rows, numeric=block.figures)}"


def escape(text: str) -> str:
    """Keep a name from being read as Markdown or HTML."""
    for special in "\\|*_`[":
        text = text.replace(special, f"\\{special}")
    return text.replace("<", "&lt;").replace("\n", " ")


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {escape(line)}" for line in lines)


def row(values: Iterable[str], *, strong: bool = False) -> str:
    mark = "**" if strong else ""
    return f"| {' | '.join(f'{mark}{escape(value)}{mark}' if value else '' for value in values)} |"


def table(heads: Sequence[str], rows: Iterable[str], *, numeric: bool = False) -> str:
    """
    Args:
        rows: as `row` makes them.
        numeric: all but the first column are figures.
    """
    rules = [":--", *(("--:" if numeric else ":--") for _ in heads[1:])]
    return "\n".join([row(heads), f"| {' | '.join(rules)} |", *rows])
