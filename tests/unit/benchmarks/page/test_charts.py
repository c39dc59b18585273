"""Where charts put values, and what a page and its Markdown make of hostile text."""

from __future__ import annotations

import math

import pytest

from benchmarks.page.charts import Bar, BarGroup, Bars, Line, Panel
from benchmarks.page.document import Bullets, Chapter, Fold, Key, Paragraph, Plot, Report, Row, Section, Table
from benchmarks.page.html import to_html
from benchmarks.page.markdown import to_markdown
from benchmarks.page.scales import linear, logarithmic, round_values
from tests.support.compare_samples import Page

EVIL = '"><script>alert(1)</script>'


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [
        (0, 1840, [0, 500, 1000, 1500]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (85, 100, [85, 90, 95, 100]),
        (0, 2e-3, [0, 5e-4, 1e-3, 1.5e-3, 2e-3]),
    ],
)
def test_ticks_are_round(low: float, high: float, values: list[float]) -> None:
    assert round_values(low, high) == pytest.approx(values)


@pytest.mark.parametrize("high", [0.07, 1.3, 2, 9.99, 10, 12345])
def test_there_are_neither_few_nor_many_ticks(high: float) -> None:
    assert 4 <= len(round_values(0, high)) <= 9


def test_logarithmic_axes_name_powers_of_ten_or_what_lies_between() -> None:
    assert [value for value, _ in logarithmic("", 0.02, 300).ticks] == pytest.approx([0.1, 1, 10, 100])
    assert [text for _, text in logarithmic("", 0.3, 3).ticks] == ["0.5", "1", "2"]
    axis = logarithmic("", 1, 100)
    assert [axis.place(value) for value in (1, 10, 100)] == [0, 50, 100]
    assert [axis.shows(value) for value in (1, 0, -1, math.nan, math.inf)] == [True, False, False, False, False]


def test_an_axis_of_one_value_has_a_length() -> None:
    assert linear("", 0, 0).place(0) == 0
    assert 0 < logarithmic("", 5, 5).place(5) < 100


def test_a_line_is_cut_where_there_is_no_value() -> None:
    line = Line([(0, 1), (1, 2), (2, math.nan), (3, 4), (4, 5)], "#000000", ["x"])
    panel = Panel("", [line], linear("", 0, 4), linear("", 0, 5))
    assert panel.path(line) == "M0 80L25 60M75 20L100 0"
    assert panel.area(line) == ""
    band = Line([], "#000000", [], band=[(0, 0, 5), (4, 1, math.nan), (4, 2.5, 5)])
    assert panel.area(band) == "M0 0L100 0L100 50L0 100Z"


def test_the_longest_ink_fills_a_chart_of_bars() -> None:
    bars = [Bar.single("a", "", 50, "#000000", "", interval=(40, 80)), Bar.single("b", "", 60, "#000000", "")]
    assert Bars([BarGroup("", bars)]).share(40) == 50
    assert Bars([BarGroup("", bars, mark=160)]).share(40) == 25
    assert Bars([]).share(0) == 0


@pytest.mark.parametrize(("mark", "at"), [(None, 40), (30, 40), (40, 40), (41, 41), (64, 64), (65, 40), (100, 40)])
def test_the_text_beside_a_bar_does_not_touch_a_line(mark: float | None, at: float) -> None:
    bar = Bar.single("a", "40", 35, "#000000", "", interval=(30, 40))
    group = BarGroup("", [bar], mark)
    chart = Bars([group, BarGroup("", [Bar.single("b", "100", 100, "#000000", "")])])
    assert chart.text_at(bar, group) == at


def everywhere(text: str) -> Report:
    """A report with this text in every place."""
    bar = Bar.single(text, text, 1.0, "#000000", text)
    plot = Plot("compare-x", text, text, text, [Key(text, "#000000")], Bars([BarGroup(text, [bar])]))
    table = Table(text, [text, text], [[Row([text, text])]])
    section = Section(text, [plot, table, Bullets([text]), Fold(text, [Paragraph(text)])])
    chapter = Chapter("part", text, [text], [section], about=text)
    return Report(text, [text], [section], [], about=text, chapters=[chapter])


def test_text_never_becomes_markup() -> None:
    html = to_html(everywhere(EVIL))
    page = Page(html)
    assert "script" not in page.tags
    assert not page.open
    assert page.tags == Page(to_html(everywhere("x"))).tags
    assert "<script" not in to_markdown(everywhere(EVIL))
    assert "# \\[x](" in to_markdown(everywhere("[x](y)"))
