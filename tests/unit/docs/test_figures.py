"""The figures in the pages are those of the committed results, and a wrong one is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.tools import charts, figures, offline
from docs.tools.catalogue import FIGURES, TABLES
from tests.support.groups import ROOT

NAME = "resnet-ring-over-default"
RIGHT = f"it was {FIGURES[NAME]()}<!-- {NAME} --> times as fast"


def test_every_page_says_what_the_results_say() -> None:
    assert [line for page in figures.pages() for line in figures.problems(page.read_text("utf-8"))] == []


def test_every_chart_is_what_the_results_make() -> None:
    assert charts.main(["--check"]) == 0


def test_every_figure_and_table_is_quoted() -> None:
    text = "".join(page.read_text("utf-8") for page in figures.pages())
    assert {name for name in FIGURES if f"<!-- {name} -->" not in text} == set()
    assert {name for name in TABLES if f"<!-- table: {name} -->" not in text} == set()


@pytest.mark.parametrize("said", ["2.8", "12.9", "2.90", ""])
def test_a_wrong_figure_is_named(said: str) -> None:
    assert figures.problems(RIGHT) == []
    (line,) = figures.problems(RIGHT.replace("2.9", said))
    assert line.startswith(f"{NAME}: the page says")
    assert "the results say '2.9'" in line


def test_an_unknown_name_is_told() -> None:
    assert figures.problems("7<!-- no-such-figure -->") == ["no figure is called 'no-such-figure'"]
    assert figures.problems("<!-- table: none -->\n\n|a|\n|-|\n|1|\n") == ["no table is called 'none'"]


def table_page() -> str:
    found = re.search(r"<!-- table: push-pull -->\n\n(\|.*\n)+", (ROOT / "docs/performance.md").read_text("utf-8"))
    assert found is not None
    return found[0]


def test_a_wrong_cell_is_named() -> None:
    assert figures.problems(table_page()) == []
    *right, last = TABLES["push-pull"]()[0]
    (line,) = figures.problems(table_page().replace(f"| {last} |", "| 0.1 |", 1))
    assert line.startswith(f"table push-pull, row 1: the page says {[*right, '0.1']}")


def test_a_missing_row_is_told() -> None:
    without = "\n".join(line for line in table_page().splitlines() if "Ray" not in line)
    assert figures.problems(without) == ["table push-pull: 6 rows, the results make 7"]


def test_results_are_few_and_quoted() -> None:
    files = [path for path in (ROOT / "benchmarks" / "results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_000_000
    assert {path.suffix for path in files} <= {".json", ".md", ".toml"}
    catalogue = (ROOT / "docs/tools/catalogue.py").read_text("utf-8")
    names = [str(path.relative_to(ROOT / "benchmarks/results")) for path in files if path.suffix == ".json"]
    assert [name for name in names if name not in catalogue] == []


def test_what_a_page_loads_from_outside_is_found(tmp_path: Path) -> None:
    link = '<a href="https://ui.perfetto.dev">a link</a> <link rel="canonical" href="https://example.org/">'
    assert offline.loads(link) == []
    assert offline.loads('<script async src="https://unpkg.com/x.js"></script>') == ["https://unpkg.com/x.js"]
    assert offline.loads('<link rel="stylesheet" href="//fonts.example/css">') == ["//fonts.example/css"]
    assert offline.loads("@import url(https://example.org/a.css)") == ["https://example.org/a.css"]
    (tmp_path / "index.html").write_text('<img src="http://example.org/a.png">')
    assert offline.main([str(tmp_path)]) == 1
    (tmp_path / "index.html").write_text(link)
    assert offline.main([str(tmp_path)]) == 0
