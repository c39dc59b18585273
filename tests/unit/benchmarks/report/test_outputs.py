"""The report on the terminal, as Markdown and as a page."""

from __future__ import annotations

import re

import pytest

from benchmarks.page.charts import Bars, Lines
from tests.support.compare_samples import Page, Results, a_run, results_of
from tests.support.reporting import plots, terminal, to_html, to_markdown


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
        assert marked == [("ring/shm", "2")]  # at N=4 there is a tie

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
        marked = re.findall(r"^\| \*\*(\S+)\*\* \| \*\*(\d)\*\*", to_markdown(good), re.MULTILINE)
        assert marked == [("ring/shm", "2")]

    def test_tags_are_text(self) -> None:
        assert "<b>" not in to_markdown(results_of(a_run("<b>x N=2", 100), a_run("ps N=2", 50)))


def test_a_sum_of_medians_beside_a_median_is_explained(good: Results) -> None:
    good["runs"][1]["phases_ms"] = {"forward": 10.0, "sync": 2.0}
    (breakdown,) = (plot for plot in plots(good) if plot.name == "compare-breakdown")
    assert isinstance(breakdown.chart, Bars)
    assert breakdown.chart.groups[1].bars[0].text == "12.0 ms"
    assert breakdown.caption.endswith("not the median of the step: medians do not add up.")
    assert breakdown.caption in Page(to_html(good)).texts


class TestHtml:
    def test_strings_are_escaped(self, good: Results) -> None:
        evil = "<script>alert('&')</script>"
        results = results_of(*good["runs"], a_run(f"{evil} N=2", 10))
        results["command"] = results["environment"]["cpu"] = results["missing"][evil] = f'{evil}"'
        results["runs"][0]["phases_ms"][evil] = 1.0
        html = to_html(results)
        page = Page(html)
        assert "script" not in page.tags
        assert not page.open
        assert sum(evil in text for text in page.texts) >= 5
        assert "onload" not in html
        assert '"<' not in html.replace('"</', "")

    def test_a_name_stays_within_its_attribute(self) -> None:
        results = results_of(a_run('" onmouseover="x N=2', 10), a_run("ps N=2", 50))
        assert '" onmouseover' not in to_html(results)

    def test_nothing_is_loaded_and_nothing_runs(self, good: Results) -> None:
        html = to_html(good)
        assert Page(html).links == ["data:,"]
        assert "default-src 'none'; style-src" in html
        assert not re.search(r"https?:|//\w|@import|url\(", html)
        assert len(html.encode()) < 1_000_000

    def test_page_is_labelled(self, good: Results) -> None:
        html = to_html(good)
        assert '<html lang="en">' in html
        assert html.count("<h1>") == 1
        assert html.count("<caption>") == html.count("<table") == 3
        assert len(re.findall(r'role="img" aria-label="[^"]{30,}"', html)) == 3

    def test_the_verdict_its_picture_and_one_line_of_certificate_come_first(self, good: Results) -> None:
        html = to_html(good)
        certificate = ["<summary", "✓ same bits", "</details>"]
        order = ["<h1>", 'class="verdict"', 'id="compare-throughput"', *certificate, "<h2>Results"]
        assert sorted(order, key=html.index) == order

    def test_diverged_training_ends_its_line(self, good: Results) -> None:
        good["runs"][1]["curve"] = [[0.0, 2.3], [0.01, 2.2], [0.02, float("nan")], [0.03, 2.1]]
        (panel, *_) = next(chart for chart in charts(good) if isinstance(chart, Lines)).panels[1:]
        assert panel.path(panel.lines[0]).count("L") == 1
        assert "nan" not in to_html(good).lower()

    def test_bars_show_the_measurements(self, good: Results) -> None:
        bars = next(chart for chart in charts(good) if isinstance(chart, Bars))
        shown = [bar for group in bars.groups for bar in group.bars]
        assert [bar.segments[0].value for bar in shown] == [run["samples_per_s"] for run in good["runs"]]
        assert shown[-1].interval == (1790, 1850)
        assert [group.mark for group in bars.groups] == [1000, 2000, 4000]

    def test_a_contestant_keeps_its_colour(self, good: Results) -> None:
        good["runs"].append(a_run("torch-ddp N=2", 10))
        bars, _, lines = charts(good)
        assert isinstance(bars, Bars)
        assert isinstance(lines, Lines)
        colours = [bar.segments[0].colour for group in bars.groups for bar in group.bars]
        assert colours == [line.colour for panel in lines.panels for line in panel.lines]
        assert len(set(colours)) == 6


def charts(results: Results) -> list[object]:
    return [plot.chart for plot in plots(results)]
