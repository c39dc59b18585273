"""The page of a whole job: plots of several parts on one page, drawn by a browser, and the verdict on top."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from benchmarks.page.document import Bullets, Fold
from benchmarks.reports.recommendation import races_in
from tests.support import crossover_samples as crossover
from tests.support.compare_samples import Page, a_run, results_of
from tests.support.reporting import report, to_html, to_markdown, verdict
from tests.support.sweep_samples import sample as a_sweep
from tests.support.typed_results import completed, typed
from tests.unit.benchmarks import test_accuracy_report as accuracy


def a_script() -> dict[str, Any]:
    """script.json of a program under ps, ring and Paddle."""

    def run(contestant: str, step_ms: float) -> dict[str, Any]:
        interval = [step_ms - 5, step_ms + 5]
        scheme = re.split("[ /]", contestant)[0]
        about = {"contestant": contestant, "scheme": scheme, "nranks": 2, "repetitions": 3, "memory_mb": 210.0}
        return {**about, "step_ms": step_ms, "step_ms_interval": interval}

    runs = [run("ps/shm N=2", 104), run("ring/shm N=2", 100), run("paddle N=2", 150)]
    certificate = {
        "identical": True,
        "passed": True,
        "ours": ["ps/shm N=2", "ring/shm N=2"],
        "against_paddle": {"paddle N=2": {"5": 0.0, "20": 0.0}},
        "bounds": {"5": 1e-4, "20": 1e-2},
        "schemes": {run["contestant"]: "a" * 64 for run in runs},
    }
    head = {key: a_sweep()[key] for key in ("created", "environment", "command")}
    whole = {**head, "certificate": certificate, "failed": {}, "runs": runs}
    return completed(whole, "script")


def make_busy(results: dict[str, Any], count: int) -> None:
    """So many rounds of a program, on a machine that others use."""
    for run in results["runs"]:
        run.update(repetitions=count, step_ms_interval=[0.8 * run["step_ms"], 1.2 * run["step_ms"]])


def all_failed() -> dict[str, Any]:
    """script.json of a program that never ended well."""
    whole = a_script()
    whole["certificate"].update(ours=[], against_paddle={}, schemes={})
    failed = {run["contestant"]: {"reason": "exit code 1: gloo", "output": []} for run in whole["runs"]}
    return {**whole, "runs": [], "failed": failed}


def test_one_rank_is_no_race_between_schemes() -> None:
    program = a_script()
    program["runs"] += [{**run, "nranks": 1, "contestant": f"{run['scheme']} N=1"} for run in program["runs"]]
    assert [race.where for race in races_in("T", typed(program))] == ["T, N=2"]


def a_compare() -> dict[str, Any]:
    """The ring is clearly faster at N=2; at N=4 the two are within noise."""
    return results_of(
        a_run("local N=1", 1000),
        a_run("ps/shm N=2", 1600),
        a_run("ring/shm N=2", 1840),
        a_run("ps/shm N=4", 1750, low=1700, high=1800),
        a_run("ring/shm N=4", 1820, low=1790, high=1850),
    )


def a_part(name: str, results: dict[str, Any] | None, status: str = "done", reason: str = "") -> dict[str, Any]:
    about = {"name": name, "title": name.upper(), "command": "python -m benchmarks compare <x>", "seconds": 3.0}
    return {**about, "status": status, "reason": reason, "results": results}


def a_suite(*parts: dict[str, Any]) -> dict[str, Any]:
    return completed(
        {
            "schema": 1,
            "kind": "suite",
            "title": "A <job>",
            "created": "2026-11-21T08:30:00+00:00",
            "command": "python -m benchmarks compare --preset quick",
            "synthetic": False,
            "environment": a_compare()["environment"],
            "parts": list(parts),
        },
        "suite",
    )


@pytest.fixture
def suite() -> dict[str, Any]:
    """Two comparisons, a sweep and a program."""
    second = copy.deepcopy(a_compare())
    second["runs"] = [run for run in second["runs"] if run["nranks"] < 4]
    return a_suite(
        a_part("one", a_compare()), a_part("two", second), a_part("sweep", a_sweep()), a_part("script", a_script())
    )


def folded(results: dict[str, Any]) -> list[str]:
    """What stands behind the recommendation."""
    fold = report(results).sections[1].blocks[0]
    assert isinstance(fold, Fold)
    (bullets,) = fold.blocks
    assert isinstance(bullets, Bullets)
    return list(bullets.lines)


def test_every_plot_has_a_place_and_a_name_of_its_own(suite: dict[str, Any]) -> None:
    html = to_html(suite)
    page = Page(html)
    assert not page.open
    figures = re.findall(r'<div class="plot \w+" id="([^"]+)"', html)
    assert figures[0] == "suite-races"
    assert len(figures) == 1 + 3 + 3 + 1 + 1
    assert {name.rpartition("-compare-")[0] for name in figures if "-compare-" in name} == {"part-one", "part-two"}
    assert [link for link in page.links if link != "data:,"] == [f"#part-{p['name']}" for p in suite["parts"]]
    assert len(set(re.findall(r' id="([^"]+)"', html))) == len(re.findall(r' id="([^"]+)"', html))
    assert page.texts.count("A <job>") == 2
    assert html.count("<h2>How to read this</h2>") == html.count("<h2>Environment</h2>") == 1
    assert html.count("<h3>Throughput</h3>") == 2


class TestVerdict:
    def test_one_scheme_is_recommended(self, suite: dict[str, Any]) -> None:
        assert verdict(suite) == [
            "On this machine (AMD EPYC, 2 cores): use the all-reduce (collective). It is faster in 2 of 4 comparisons "
            "on several ranks, by 15% (TWO, N=2); within noise in 2."
        ]

    def test_its_grounds_stand_below_the_picture(self, suite: dict[str, Any]) -> None:
        lines = folded(suite)
        assert lines[0].endswith(
            "Each contestant was measured 3 times in turn. Only differences beyond noise count (two equals look apart "
            "in 1 of 10 cases). Memory speed varied by 3.0%."
        )
        assert lines[1] == "The better of the two against paddle.DataParallel: 1.50 times as fast (SCRIPT, N=2)."
        assert lines[2].startswith("Headroom: the fastest contestant computes for 97% (TWO, N=2) of a step.")
        assert lines[3] == "SWEEP: all_reduce reaches 50% of the machine's limit at 100 MB and N=4 (shm)."
        assert len(lines) == 4

    def test_emulated_hosts_have_a_sentence_of_their_own(self, suite: dict[str, Any]) -> None:
        suite["parts"] += [a_part("map", crossover.sample()), a_part("time", accuracy.results_of())]
        first, hosts = verdict(suite)
        assert first.startswith("On this machine")
        assert hosts.startswith("MAP: A whole step of SGD between emulated hosts: the ring is faster in ")

    def test_times_to_accuracy_alone(self) -> None:
        bits, first = verdict(a_suite(a_part("time", accuracy.results_of())))
        assert bits.startswith("TIME: Same bits: ")
        assert "reaches" in first

    def test_each_may_win_somewhere(self) -> None:
        other = results_of(a_run("ps/shm N=2", 1100), a_run("ring/shm N=2", 1000))
        assert verdict(a_suite(a_part("a", a_compare()), a_part("b", other)))[0].endswith(
            "it depends on the job. Of 3 comparisons on several ranks, the parameter server (ps) is faster in 1: "
            "by 10% (B, N=2); the all-reduce (collective) in 1: by 15% (A, N=2); 1 within noise."
        )

    def test_neither_wins(self) -> None:
        tied = results_of(a_run("ps/shm N=2", 1001), a_run("ring/shm N=2", 1000))
        assert verdict(a_suite(a_part("a", tied)))[0].endswith(
            "either scheme will do. In 1 comparison on several ranks, the two are within noise of each other."
        )

    @pytest.mark.parametrize("count", [1, 2])
    def test_few_repetitions_decide_nothing(self, count: int) -> None:
        once = a_compare()
        for run in once["runs"]:
            run["repetitions"] = count
        (first,) = verdict(a_suite(a_part("a", once)))
        assert first.endswith("each contestant was measured only once or twice, so neither scheme can be recommended.")
        noise = "with one repetition noise is unknown" if count == 1 else "two equals look apart in 1 of 3 cases"
        assert f"({noise})" in folded(a_suite(a_part("a", once)))[0]

    def test_nothing_to_recommend(self) -> None:
        suite = a_suite(a_part("a", results_of(a_run("local N=1", 1000))), a_part("b", None, "missing", "not run"))
        suite["synthetic"] = True
        first, synthetic, missing = verdict(suite)
        assert first == "No part measured both schemes on several ranks, so no scheme can be recommended."
        assert synthetic.startswith("Without --data-dir, synthetic data of the same shape")
        assert missing == "B is missing: not run."

    def test_what_is_wrong_has_no_speed(self, suite: dict[str, Any]) -> None:
        found = suite["parts"][0]["results"]
        found["certificate"]["identical"] = found["certificate"]["passed"] = False
        found["certificate"]["schemes"]["ring/shm N=2"] = "f" * 64
        found["runs"] = []
        suite["parts"] = [
            a_part("one", found, "wrong", "CertificateFailed: not the same"),
            a_part("two", None, "failed", "x"),
        ]
        for text in (to_html(suite), to_markdown(suite)):
            assert "ONE computed the WRONG thing, so no speed of it is shown: CertificateFailed: not the same." in text
            assert "TWO failed: x." in text
            assert "the parameters of ring/shm N=2 differ" in text
            assert "✗ differs" in text
            assert not re.search("samples/s|1,840|Plotly|How to read", text)


def test_markdown_folds_the_parts(suite: dict[str, Any]) -> None:
    text = to_markdown(suite)
    assert text.startswith("# A &lt;job>\n\n- On this machine")
    assert text.count(" in figures</summary>") == 4
    assert text.count("<details>") == text.count("</details>") == 1 + 4 + 3  # with the grounds and the certificates
    assert "| paddle N=2 | 150.0 | 145.0–155.0 | 1.00x |" in text
