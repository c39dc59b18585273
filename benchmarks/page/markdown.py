"""The pieces of a report in Markdown; text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["bullets", "escape", "row", "table"]


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
