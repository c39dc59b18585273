"""The report on the terminal, as Markdown and as a page."""

from __future__ import annotations

import json
import re

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

from benchmarks.reports.compare import groups, to_markdown
from benchmarks.reports.compare_figures import plots
from benchmarks.reports.compare_page import to_html
from tests.support.compare_samples import Page, Results, a_run, results_of, terminal


class TestTerminal:
    @pytest.mark.parametrize("width", [80, 100])
    def test_fits(self, good: Results, width: int) -> None:
        good["missing"] = {"torch-ddp": "PyTorch is not installed"}
        lines = terminal(good, width).splitlines()
        assert max(map(len, lines)) <= width
        assert any(re.match(r" ring/shm \* +2 +1,840 \(1,835–1,845\) +33.1/40.2 .* 93.0", line) for line in lines)
        assert any(re.match(r" ring/tcp N=2 +✓ same bits +222222222222 *$", line) for line in lines)
        assert "torch-ddp is absent: PyTorch is not installed." in lines

    def test_only_the_fastest_of_a_group_is_marked(self, good: Results) -> None:
        marked = re.findall(r"^ (\S.*?) \* +(\d)", terminal(good, 100), re.MULTILINE)
        assert marked == [("ring/shm", "2"), ("ring/shm", "4")]

    def test_markup_in_names_is_text(self) -> None:
        assert "[red]x" in terminal(results_of(a_run("[red]x N=2", 100), a_run("ps N=2", 50)), 100)


class TestMarkdown:
    def test_tables_are_well_formed(self, good: Results) -> None:
        good["runs"].append(a_run("odd|name N=2", 10))
        tables = re.findall(r"(?:^\|.*\n)+", to_markdown(good), re.MULTILINE)
        assert len(tables) == 3
        for table in tables:
            heads, rule, *rows = table.splitlines()
            columns = len(re.split(r"(?<!\\)\|", heads))
            assert re.fullmatch(r"\|( :?--:? \|)+", rule)
            assert rows
            assert {len(re.split(r"(?<!\\)\|", line)) for line in (rule, *rows)} == {columns}

    def test_fastest_is_bold(self, good: Results) -> None:
        assert re.findall(r"^\| \*\*(\S+)\*\* \| \*\*(\d)\*\*", to_markdown(good), re.MULTILINE) == [
            ("ring/shm", "2"),
            ("ring/shm", "4"),
        ]

    def test_tags_are_text(self) -> None:
        assert "<b>" not in to_markdown(results_of(a_run("<b>x N=2", 100), a_run("ps N=2", 50)))


class TestHtml:
    def test_strings_are_escaped(self, good: Results) -> None:
        evil = "<script>alert('&')</script>"
        results = results_of(*good["runs"], a_run(f"{evil} N=2", 10))
        results["command"] = results["environment"]["cpu"] = results["missing"][evil] = f'{evil}"'
        results["runs"][0]["phases_ms"][evil] = 1.0
        page = Page(to_html(results))
        assert page.tags.count("script") == 3
        assert not page.open
        assert sum(evil in text for text in page.texts) >= 5
        assert "<" not in page.scripts[1]
        assert json.loads(page.scripts[1])

    def test_nothing_is_loaded(self, good: Results) -> None:
        html = to_html(good)
        assert html.count(get_plotlyjs()) == 1
        assert Page(html).links == ["data:,"]
        own = html.replace(get_plotlyjs(), "")
        assert "default-src 'none'" in own
        assert not re.search(r"https?:|//\w|@import|url\(", own)

    def test_page_is_labelled(self, good: Results) -> None:
        html = to_html(good).replace(get_plotlyjs(), "")
        assert '<html lang="en">' in html
        assert html.count("<h1>") == 1
        assert html.count("<caption>") == html.count("<table") == 3
        assert len(re.findall(r'role="img" aria-label="[^"]{30,}"', html)) == 3

    def test_diverged_training_is_still_json(self, good: Results) -> None:
        good["runs"][1]["curve"][1][1] = float("nan")
        figures = json.loads(Page(to_html(good)).scripts[1], parse_constant=pytest.fail)
        assert [y for trace in figures["compare-loss"]["data"] for y in trace["y"] if y is None] == [None]

    def test_figures_are_valid(self, good: Results) -> None:
        for plot in plots(groups(good)):
            go.Figure(json.loads(re.sub(r"var\(--\w+\)", "#888888", json.dumps(plot.figure))))

    def test_bars_show_the_measurements(self, good: Results) -> None:
        *bars, linear = plots(groups(good))[0].figure["data"]
        assert [bar["y"][0] for bar in bars] == [run["samples_per_s"] for run in good["runs"]]
        assert (bars[-1]["error_y"]["array"], bars[-1]["error_y"]["arrayminus"]) == ([30], [30])
        assert linear["y"][::4] == [1000, 2000, 4000]

    def test_a_contestant_keeps_its_colour(self, good: Results) -> None:
        good["runs"].append(a_run("torch-ddp N=2", 10))
        bars, _, lines = plots(groups(good))
        colours = [bar["marker"]["color"] for bar in bars.figure["data"][:-1]]
        assert colours == [line["line"]["color"] for line in lines.figure["data"]]
        assert len(set(colours)) == 6
