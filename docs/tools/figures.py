"""Check that the figures in the pages are those of the committed results: python -m docs.tools.figures [--list].

In a page a figure is followed by its name in a comment, and a table is preceded by its name:

    the ring was 2.9<!-- resnet-ring-over-default --> times as fast

    <!-- table: push-pull -->

    | ms | 80 KB | 16 MB |
    |---|---:|---:|
    | ps-shm | 0.74 | 5.2 |

`docs/tools/catalogue.py` says how each is computed. Of a table the last columns are compared, as many as were computed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docs.tools.catalogue import FIGURES, TABLES

__all__ = ["main", "pages", "problems"]

ROOT = Path(__file__).resolve().parents[2]
FIGURE = re.compile(r"(\S*?)[*~≈]*<!-- ([a-z0-9-]+) -->")
TABLE = re.compile(r"<!-- table: ([a-z0-9-]+) -->\s*\n((?:\|.*\n?)+)")


def pages() -> list[Path]:
    """The READMEs and every page of the site."""
    return [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def problems(text: str) -> list[str]:
    """What is wrong with the figures in a page's text, one line each."""
    found = []
    for said, name in FIGURE.findall(text):
        if name not in FIGURES:
            found.append(f"no figure is called {name!r}")
        elif not said.endswith(wanted := FIGURES[name]()) or said.removesuffix(wanted)[-1:].isdigit():
            found.append(f"{name}: the page says {said!r}, the results say {wanted!r}")
    for name, table in TABLE.findall(text):
        found += _table_problems(name, table) if name in TABLES else [f"no table is called {name!r}"]
    return found


def _table_problems(name: str, table: str) -> list[str]:
    body = [[cell.strip(" *") for cell in line.strip().strip("|").split("|")] for line in table.splitlines()[2:]]
    wanted = TABLES[name]()
    said = [cells[-len(row) :] for cells, row in zip(body, wanted, strict=False)]
    if len(body) != len(wanted):
        return [f"table {name}: {len(body)} rows, the results make {len(wanted)}"]
    return [
        f"table {name}, row {number}: the page says {here}, the results say {there}"
        for number, (here, there) in enumerate(zip(said, wanted, strict=True), 1)
        if here != there
    ]


def main(arguments: list[str]) -> int:
    if arguments == ["--list"]:
        for name, figure in FIGURES.items():
            print(f"{name} = {figure()}")
        for name, table in TABLES.items():
            print(f"table {name}", *(" | ".join(row) for row in table()), sep="\n  ")
        return 0
    wrong = [f"{page.relative_to(ROOT)}: {line}" for page in pages() for line in problems(page.read_text("utf-8"))]
    print(*wrong, sep="\n") if wrong else print("figures: every one is as the committed results have it")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
