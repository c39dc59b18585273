"""The report of a crossover map: who wins where, by how much, and by which bytes."""

from __future__ import annotations

import re
from html import unescape
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from benchmarks.page.charts import HeatMap
from benchmarks.page.language import speaking
from benchmarks.records.result_files import plain
from benchmarks.reports import crossover
from benchmarks.reports.crossover_terminal import print_terminal
from tests.support.crossover_samples import MB, made, results_of, sample
from tests.support.reporting import plots, to_html, to_markdown, verdict
from tests.support.typed_results import typed


@pytest.fixture
def results() -> dict[str, Any]:
    return sample()


def test_the_verdict_says_who_wins_where_and_by_how_much(results: dict[str, Any]) -> None:
    assert plain(typed(results)) == results
    assert verdict(results) == [
        "A whole step of SGD between emulated hosts: the ring is faster in 6 of 9 cases, the parameter server in 2, "
        "1 is within noise.",
        "N=4, 1 server: the ring is 1.50 to 4.00 times faster at every size and link measured. Of 25 MB, the busiest "
        "link must carry 37.5 MB each way for the ring, 75 MB for the servers.",
        "N=4, 4 servers: with 1 MB both are within noise of each other at 100mbit, the ring is 1.20 to 1.40 times "
        "faster from 1gbit on; with 25 MB the parameter server is 1.10 to 1.17 times faster up to 1gbit, the ring is "
        "1.50 times faster at 10gbit. Of 25 MB, the busiest link must carry 37.5 MB each way in either scheme.",
        "At 10gbit, no scheme reaches more than 14% of the link's limit (a plain stream carries 9,500 Mbit/s). There, "
        "this machine's processors are the bottleneck, not the link.",
    ]


def test_servers_apart_have_a_panel_of_their_own_and_bytes_of_their_own() -> None:
    beside, apart = made("1gbit", 4, 50 * MB, 0.7, 0.9), made("1gbit", 4, 50 * MB, 0.7, 0.5, apart=True)
    assert verdict(results_of(apart, beside))[1:] == [
        "N=4, 4 servers: the ring is 1.29 times faster at every size and link measured. Of 50 MB, the busiest link "
        "must carry 75 MB each way in either scheme.",
        "N=4, 4 servers on hosts of their own: the parameter server is 1.40 times faster at every size and link "
        "measured. Of 50 MB, the busiest link must carry 75 MB each way for the ring, 50 MB for the servers.",
    ]
    older = {key: value for key, value in beside.items() if key != "apart"}  # written before servers could be apart
    assert plain(typed(results_of(older))) == results_of(beside)


def test_who_loses_without_bytes_that_explain_it_is_said_to_wait_for_something_else() -> None:
    waits = "the parameter server loses with at most {}% of the link's limit: it waits for processors or for others"
    slow = made("1gbit", 4, 50 * MB, 0.7, 1.0, apart=True)
    assert waits.format(42) in verdict(results_of(slow))[1]
    told = verdict(results_of(made("1gbit", 1, 50 * MB, 0.7, 3.0)))  # 42 % too, but its bytes alone take 1.26 s
    assert "it waits for" not in " ".join(told)
    nobody = verdict(results_of(made("1gbit", 4, 50 * MB, 1.5, 2.0, apart=True)))  # said of the link, once
    assert "it waits for" not in " ".join(nobody)
    assert nobody[-1].startswith("At 1gbit, no scheme reaches more than 42% of the link's limit")


def test_sizes_are_named_where_only_some_of_them_wait_for_something_else() -> None:
    small = [made(link, 4, MB, ring, ps, apart=True) for link, ring, ps in (("1gbit", 0.015, 0.03), ("10gbit", 1, 2))]
    lost, won = made("10gbit", 4, 25 * MB, 0.03, 0.06, apart=True), made("1gbit", 4, 25 * MB, 0.33, 0.28, apart=True)
    told = verdict(results_of(*small, won, lost))[1]
    assert "with 25 MB the parameter server is 1.18 times faster at 1gbit" in told
    assert "With 1 MB at 1gbit, 10gbit and with 25 MB at 10gbit, the parameter server loses with at most 35%" in told
    assert "At 10gbit, the parameter server loses" in verdict(results_of(small[1], lost, won))[1]  # each size there is
    with speaking("zh"):
        assert (
            "1 MB 经 1gbit、10gbit，以及 25 MB 经 10gbit 时，参数服务器较慢"
            in verdict(results_of(*small, won, lost))[1]
        )


def winner_of(cell: dict[str, Any]) -> str:
    return crossover.winner(typed(results_of(cell)).cells[0])


def test_spreads_that_overlap_are_noise() -> None:
    assert winner_of(made("1gbit", 1, MB, 1.0, 1.5)) == "ring"
    assert winner_of(made("1gbit", 1, MB, 1.5, 1.0)) == "ps"
    assert winner_of(made("1gbit", 1, MB, 1.0, 1.5, spread=0.21)) == ""
    assert verdict(results_of(made("1gbit", 1, MB, 0.015, 0.016, spread=0.2)))[1:] == [
        "N=4, 1 server: both are within noise of each other at every size and link measured. Of 1 MB, the busiest link "
        "must carry 1.5 MB each way for the ring, 3 MB for the servers."
    ]
    assert "measured once, so its noise is unknown" in verdict(results_of(made("1gbit", 1, MB, 1, 2), repetitions=1))[0]


def test_the_map_shows_every_cell(results: dict[str, Any]) -> None:
    (plot,) = plots(results)
    assert plot.name.startswith("crossover-")
    assert isinstance(plot.chart, HeatMap)
    one, four = plot.chart.tables
    assert list(one.columns) == list(four.columns) == ["100mbit", "1gbit", "10gbit"]
    assert [head for head, _ in one.rows] == [head for head, _ in four.rows] == ["1 MB", "25 MB"]
    texts = [[[cell and cell.text for cell in cells] for _, cells in table.rows] for table in (one, four)]
    assert texts[0] == [[None, None, None], ["ring 3.91×", "ring 4.00×", "ring 1.50×"]]
    assert texts[1][0][0] == "≈ 1.01×"
    assert texts[1][1] == ["server 1.10×", "server 1.17×", "ring 1.50×"]
    colours = [cell.colour for table in (one, four) for _, cells in table.rows for cell in cells if cell]
    assert colours[1] == "rgba(0,119,187,0.65)"  # the largest lead
    assert colours[3] == "rgba(128,128,128,0.15)"  # a tie
    assert colours[6] == "rgba(199,119,0,0.18)"
    assert "25 MB at 1gbit server 1.17×" in plot.alt
    assert "1 MB at 100mbit within noise (1.01×)" in plot.alt


def test_every_output_holds_the_verdict_and_the_figures(results: dict[str, Any]) -> None:
    screen, narrow = StringIO(), StringIO()
    print_terminal(typed(results), Console(file=narrow, width=80))
    assert max(map(len, narrow.getvalue().splitlines())) <= 80
    assert "…" not in narrow.getvalue()
    print_terminal(typed(results), Console(file=screen, width=200))
    html = to_html(results)
    for text in (screen.getvalue(), to_markdown(results), html):
        words = " ".join(text.split())
        assert all(" ".join(sentence.split()) in unescape(words) for sentence in verdict(results))
        assert "12,900" in words
        assert "within noise (1.01×)" in words or "≈ 1.01×" in words
    assert "<b>CPU" not in html
    assert html.count('id="crossover-map"') == 1
    for block in re.findall(r"(?:^\|.*\n)+", to_markdown(results), re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1
