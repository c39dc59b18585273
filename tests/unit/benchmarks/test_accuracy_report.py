"""The report of `accuracy`: who is first, what is within noise, what was not reached, and a page that holds it."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest

from benchmarks.page.charts import Bar, Bars, Line, Lines
from benchmarks.page.document import Plot
from benchmarks.reports.accuracy.entries import Spread, entries
from tests.support.reporting import plots, to_html, to_markdown, verdict
from tests.support.typed_results import completed, typed

Results = dict[str, Any]

# Seconds a step and samples/s by contestant; nobody waits for a straggler in async.
PACE = {"ps/shm N=2": (1.0, 1.0), "ps/shm N=2 async": (0.5, 1.1), "ring/shm N=2": (2.0, 0.9)}
SLOWER = {"none": 1.0, "permanent": 3.0, "random": 2.0}


def a_run(contestant: str, straggler: str, seed: int) -> dict[str, Any]:
    mode = "async" if "async" in contestant else "sync"
    pace, rate = PACE[contestant]
    slower = 1.0 if mode == "async" else SLOWER[straggler]
    noise = 1 + 0.02 * (seed - 2)
    at = [pace * slower * noise * step for step in (10, 20, 30)]
    return {
        "contestant": contestant,
        "scheme": contestant.partition("/")[0],
        "backend": "shm",
        "mode": mode,
        "nranks": 2,
        "servers": int(contestant.startswith("ps")),
        "seed": seed,
        "steps": 30,
        "straggler": straggler,
        "samples_per_s": 1000 * rate / slower * noise,
        "seconds": at[-1],
        "target_s": at[1],
        "accuracy": 0.98,
        "parameters_sha256": "f" * 64,
        "points": [
            {"step": step, "seconds": x, "loss": loss, "accuracy": accuracy}
            for step, x, loss, accuracy in zip((10, 20, 30), at, (2.0, 0.3, 0.1), (0.8, 0.971, 0.98), strict=True)
        ],
    }


def results_of(seeds: tuple[int, ...] = (1, 2, 3)) -> Results:
    return completed(
        {
            "schema": 1,
            "kind": "accuracy",
            "created": "2026-11-21T18:30:00+00:00",
            "command": "python -m benchmarks accuracy",
            "environment": {
                "cpu": "AMD <EPYC>",
                "cores": 2,
                "memory_bytes": 25_000_000_000,
                "memcpy_gb_per_s": 8.1,
                "kernel": "6.18",
                "python": "3.11.7",
                "versions": {"numpy": "2.4.6"},
                "commit": None,
                "noise": 0.03,
            },
            "job": {
                "model": "mnist-cnn",
                "dataset": "mnist",
                "batch_size": 32,
                "optimizer": "adam",
                "lr": 0.001,
                "nranks": 2,
                "steps": 30,
                "target": 0.97,
                "eval_every": 10,
                "factor": 3.0,
                "seeds": list(seeds),
            },
            "certificate": {
                "passed": True,
                "contestants": ["ps/shm N=2", "ring/shm N=2"],
                "sha256": {str(seed): "f" * 64 for seed in seeds},
            },
            "runs": [a_run(name, straggler, seed) for seed in seeds for straggler in SLOWER for name in PACE],
        },
        "accuracy",
    )


@pytest.fixture
def good() -> Results:
    return results_of()


def never(results: Results, contestant: str, straggler: str, *seeds: int) -> None:
    for run in results["runs"]:
        if (run["contestant"], run["straggler"]) == (contestant, straggler) and run["seed"] in seeds:
            run["target_s"] = None


class TestVerdict:
    def test_bits_then_races_then_what_a_straggler_costs(self, good: Results) -> None:
        assert verdict(good) == [
            "Same bits: ps/shm N=2 and ring/shm N=2 end with identical parameters for each of 3 seeds, with and "
            "without a straggler.",
            "Without a straggler, ps/shm async reaches 97 % first, after 10.0 s (9.80–10.2); ps/shm sync takes 2.00 "
            "times as long and ring/shm takes 4.00 times as long.",
            "With rank 1 slowed 3x, ps/shm async reaches 97 % first, after 10.0 s (9.80–10.2); ps/shm sync takes 6.00 "
            "times as long and ring/shm takes 12.00 times as long.",
            "With a random rank slowed 3x in each step, ps/shm async reaches 97 % first, after 10.0 s (9.80–10.2); "
            "ps/shm sync takes 4.00 times as long and ring/shm takes 8.00 times as long.",
            "Throughput kept with rank 1 slowed 3x: ps/shm sync 33%, ps/shm async 100% and ring/shm 33%.",
            "Throughput kept with a random rank slowed 3x in each step: ps/shm sync 50%, ps/shm async 100% and "
            "ring/shm 50%.",
        ]

    def test_bands_that_overlap_are_within_noise(self, good: Results) -> None:
        for run in good["runs"]:
            if run["contestant"] == "ps/shm N=2":
                run["target_s"] = 10.1
        line = verdict(good)[1]
        assert "first, after 10.0 s (9.80–10.2), within noise of ps/shm sync; ring/shm takes 4.00 times" in line

    def test_who_does_not_reach_it_is_named_with_the_time_it_had(self, good: Results) -> None:
        never(good, "ps/shm N=2 async", "permanent", 1, 2, 3)
        never(good, "ring/shm N=2", "permanent", 1, 3)
        line = verdict(good)[2]
        assert line.startswith("With rank 1 slowed 3x, ps/shm sync reaches 97 % first, after 60.0 s")
        assert "ps/shm async (not reached in 15.0 s)" in line
        assert "ring/shm (not reached in 180 s by 2 of 3 seeds)" in line

    def test_a_minority_of_seeds_that_fail_widens_the_band(self, good: Results) -> None:
        never(good, "ps/shm N=2 async", "none", 1)
        assert "ps/shm async reaches 97 % first, after 10.2 s (10.0–not reached), within noise of" in verdict(good)[1]

    def test_nobody_reaches_it(self, good: Results) -> None:
        for name in PACE:
            never(good, name, "none", 1, 2, 3)
        assert verdict(good)[1].startswith(
            "Without a straggler, nobody reaches 97 %: ps/shm sync (not reached in 30.0 s), ps/shm async"
        )

    def test_one_seed_knows_no_noise(self) -> None:
        assert verdict(results_of((1,)))[1].endswith("; the noise of one seed is unknown.")

    def test_without_a_contestant_in_step_no_bits_are_claimed(self, good: Results) -> None:
        good["certificate"]["contestants"] = []
        assert verdict(good)[0].startswith("Without a straggler")


def test_a_spread_is_median_least_and_greatest() -> None:
    assert Spread.of([3, 1, 2]) == (2, 1, 3)
    assert Spread(2, 1, 3).overlaps(Spread(4, 3, 5))
    assert not Spread(2, 1, 3).overlaps(Spread(4, 3.1, 5))


def test_points_of_a_curve_are_medians_in_bands(good: Results) -> None:
    good["runs"][0]["points"][0]["accuracy"] = 0.7
    curve = entries(typed(good))[0][0].curve("accuracy")
    assert [at for at, _ in curve] == pytest.approx([10, 20, 30])
    assert curve[0][1] == (0.8, 0.7, 0.8)


def bars_of(plot: Plot) -> list[Bar]:
    assert isinstance(plot.chart, Bars)
    return [bar for group in plot.chart.groups for bar in group.bars]


def lines_of(plot: Plot) -> list[Line]:
    assert isinstance(plot.chart, Lines)
    return [line for panel in plot.chart.panels for line in panel.lines]


class TestPlots:
    def test_names_are_prefixed_and_the_verdict_s_picture_comes_first(self, good: Results) -> None:
        names = ["accuracy-times", "accuracy-rates", "accuracy-curves", "accuracy-loss"]
        assert [plot.name for plot in plots(good)] == names
        html = to_html(good)
        assert all(html.count(f'id="{name}"') == 1 for name in names)

    def test_bars_show_samples_per_s_and_time_to_target(self, good: Results) -> None:
        never(good, "ring/shm N=2", "none", 1, 2, 3)
        times, rates = map(bars_of, plots(good)[:2])
        assert [bar.segments[0].value for bar in rates[:3]] == pytest.approx([1000, 1100, 900])
        assert [bar.segments[0].value for bar in times[:3]] == pytest.approx([20, 10, 60])
        assert [bar.hatched for bar in times[:3]] == [False, False, True]
        assert times[2].segments[0].words == "ring/shm, no straggler: not reached in 60.0 s"
        assert rates[0].interval == pytest.approx((980, 1020))

    def test_a_band_that_never_ends_is_drawn_to_the_end_of_the_training(self, good: Results) -> None:
        never(good, "ps/shm N=2", "none", 1)
        bar = bars_of(plots(good)[0])[0]
        assert bar.segments[0].value == pytest.approx(20.4)
        assert bar.interval == pytest.approx((20, 30.6))

    def test_every_curve_has_its_band_and_a_contestant_keeps_its_colour(self, good: Results) -> None:
        times, rates, curves, loss = plots(good)
        for plot in (curves, loss):
            lines = lines_of(plot)
            assert len(lines) == 9
            assert all(len(line.band) == len(line.points) == len(line.words) == 3 for line in lines)
            for bars in (times, rates):
                assert [line.colour for line in lines] == [bar.segments[0].colour for bar in bars_of(bars)]
            assert len({line.colour for line in lines}) == 3
        assert isinstance(curves.chart, Lines)
        assert [panel.level for panel in curves.chart.panels] == [97, 97, 97]

    def test_diverged_training_is_left_out(self, good: Results) -> None:
        good["runs"][0]["points"][1]["loss"] = float("nan")
        assert "nan" not in to_html(good).lower()


def test_the_page_loads_nothing_and_escapes(good: Results) -> None:
    html = to_html(good)
    assert not re.search(r"https?:|//\w|@import|url\(", html)
    assert html.count("<h1>") == 1
    assert html.count("<caption>") == html.count("<table") == 4
    assert "so evaluation takes no time from it" in html
    assert "AMD &lt;EPYC&gt;" in html


def test_markdown_tables_are_well_formed(good: Results) -> None:
    never(good, "ring/shm N=2", "permanent", 1, 2, 3)
    text = to_markdown(good)
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(found) == 4
    for table in found:
        heads, rule, *rows = table.splitlines()
        assert rows
        assert {line.count("|") for line in (rule, *rows)} == {heads.count("|")}
    assert "| ring/shm | 300 (294–306) | not reached in 180 s | 0 of 3 | 98.0 % | 180 s" in text
    assert all(f"- {sentence}" in text for sentence in verdict(good))


def test_nothing_is_changed_by_reporting(good: Results) -> None:
    before = deepcopy(good)
    to_html(good)
    assert good == before
