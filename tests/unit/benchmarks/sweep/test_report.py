"""The tables of a sweep: bandwidths, who is faster, wrong sums have no speed."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.page.charts import Lines
from benchmarks.verbs.sweep import show
from tests.support.reporting import plots, to_html, to_markdown, verdict
from tests.support.sweep_samples import over_tls, results_of, row_of, sample
from tests.support.typed_results import typed


def test_bandwidths_are_those_of_nccl_tests() -> None:
    row = row_of("shm", 4, 10**8, [0.1, 0.2, 0.4], 0, 0.1)
    assert row["time_ms"] == pytest.approx(200)
    assert row["time_ms_interval"] == pytest.approx([100, 400])
    assert row["algbw_gb_s"] == pytest.approx(0.5)
    assert row["busbw_gb_s"] == pytest.approx(0.75)
    assert row["of_limit"] == pytest.approx(0.5)


def test_a_report_tells_who_is_faster_and_how_near_the_limit() -> None:
    found = sample()
    assert verdict(found)[1:] == [
        "N=4, our best against the best other library: 4 KiB 2.0 times slower than gloo; 1 MiB within "
        "noise of gloo; 100 MB 2.8 times faster than gloo.",
        "N=4: our best reaches 45% at 4 KiB to 60% at 1 MiB of the machine's limit.",
    ]
    text = to_markdown(found)
    assert "| 100 MB | shm | 200 | 100–400 | 0.5 | 0.75 | 50% | 0 |" in text
    (plot,) = plots(found)
    assert isinstance(plot.chart, Lines)
    lines = dict(zip([key.label for key in plot.legend], plot.chart.panels[0].lines, strict=True))
    assert [x for x, _ in lines["shm"].points] == [4096, 1 << 20, 10**8]
    assert [y for _, y in lines["shm"].points] == pytest.approx([0.2, 1.5, 200])
    assert lines["memory-limit"].dash == "dot"
    assert "50% of the limit" in lines["shm"].words[2]
    assert "no &lt;mpirun&gt;" in to_html(found)


@pytest.mark.parametrize("wrong", [0, 3])
def test_the_terminal_ends_with_the_pages_verdict(wrong: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = sample()
    found["rows"][0]["wrong"] = wrong
    show(typed(found), Console(width=300))
    sentences = verdict(found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-len(sentences) :] == sentences
    assert any("100 MB  shm" in line for line in lines) == (not wrong)


def test_wrong_sums_have_no_speed() -> None:
    found = sample()
    found["rows"][0]["wrong"] = 3
    assert verdict(found)[0] == "The sums are WRONG from shm N=4; no speed is shown."
    assert not plots(found)
    for text in (to_markdown(found), to_html(found)):
        assert "WRONG" in text
        assert "550" not in text
        assert "0.75" not in text.partition("</style>")[2].replace("0.75rem", "")


@pytest.mark.parametrize("rounds", [1, 2])
def test_few_rounds_name_no_winner(rounds: int) -> None:
    times = {"shm": [2e-4] * rounds, "gloo": [1e-4] * 3}
    _, race, few = verdict(results_of(*(row_of(name, 4, 4096, each, 0, None) for name, each in times.items())))
    assert race.endswith("4 KiB 0.2 ms against 0.1 ms of gloo (noise unknown).")
    assert few.endswith("so no winner is named: use --repetitions 5.")


def test_a_report_tells_what_tls_costs() -> None:
    costs = "tcp 4.25 times at 100 MB; tcp 1.10 times at 4 KiB"
    assert verdict(over_tls())[-1] == f"N=2, TLS takes so many times as long as plain text: {costs}."
    assert "| 100 MB | tcp-tls | 170 |" in to_markdown(over_tls())
