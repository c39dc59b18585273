"""What is told of a user's program under each scheme: in a table's cells and on the terminal."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from benchmarks.reports.facts import busy
from benchmarks.reports.script import cells, heads
from benchmarks.stats.interval import Measured
from benchmarks.verbs.script import show
from tests.support.reporting import report, to_html, to_markdown, verdict
from tests.support.typed_results import typed
from tests.unit.benchmarks.test_suite_report import a_script, all_failed, make_busy


def table(results: dict[str, Any]) -> list[list[str]]:
    runs = typed(results).runs
    return [heads(runs), *(cells(run, runs) for run in runs)]


def test_a_column_is_for_a_contestant_that_ran() -> None:
    results = a_script()
    assert table(results)[0] == ["contestant", "step ms", "interval", "vs paddle", "memory MB"]
    del results["runs"][2]
    assert table(results)[0] == ["contestant", "step ms", "interval", "memory MB"]


def test_a_cell_says_where_paddle_failed() -> None:
    results = a_script()
    results["runs"].append({**results["runs"][0], "contestant": "ps/shm N=4", "nranks": 4})
    assert [line[3] for line in table(results)] == ["vs paddle", "1.44x", "1.50x", "1.00x", "failed"]


@pytest.mark.parametrize("passed", [True, False])
def test_the_terminal_ends_with_the_verdict_of_the_report(*, passed: bool) -> None:
    results = a_script()
    results["failed"] = {"[red]x N=2": {"reason": "exit code 1: [y]", "output": []}}
    if not passed:
        results["certificate"].update(identical=False, passed=False)
        results["runs"] = []
    console = Console(file=StringIO(), width=60)
    show(typed(results), console)
    told = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert told[-len(verdict(results)) :] == verdict(results)
    assert told[-1] == "[red]x N=2 failed: exit code 1: [y]."
    assert any("ring/shm is the fastest" in line or "lowest median" in line for line in told) == passed


def test_one_of_ours_is_compared_with_paddle() -> None:
    results = a_script()
    results["certificate"]["ours"] = ["ring/shm N=2"]
    first, second, *_ = verdict(results)
    assert first == "Compared with paddle N=2 only, for no two schemes of ours ran at the same N."
    assert second.startswith("Against paddle N=2, ")
    results["certificate"]["ours"].append("ring/shm N=4")
    assert verdict(results)[0] == first
    assert not report(results).failed


def test_where_all_fail_the_report_looks_so_and_has_no_empty_table() -> None:
    results = all_failed()
    assert verdict(results)[0] == "Nothing to compare, for no run ended well."
    assert 'class="verdict failed"' in to_html(results)
    assert report(results).sections == []
    results["failed"] = {}  # of ours nobody was asked for
    assert not report(results).failed


@pytest.mark.parametrize("count", [1, 2])
def test_few_rounds_name_no_winner(count: int) -> None:
    results = a_script()
    for run in results["runs"]:
        run["repetitions"] = count
    told = "\n".join(verdict(results))
    assert "ring/shm has the lowest median" in told
    assert "(50.0% slower, noise unknown)" in told
    assert "so no winner is named: use --repetitions 5." in told


def test_the_columns_are_explained_and_why_not_all_steps_are_compared() -> None:
    results = a_script()
    text = to_markdown(results)
    assert "vs paddle: the time of its step over this one's, at the same N. Above 1 this one is faster." in text
    assert "memory MB: of rank 0" in text
    assert "no later" not in text
    results["runs"][0]["steps"] = 32
    assert "compared after 5 and 20 steps and no later" in to_markdown(results)


def test_a_busy_machine_is_told_and_that_either_will_do() -> None:
    results = a_script()
    del results["runs"][2]
    assert verdict(results)[-1].endswith("ps/shm 104.0 ms (within noise of it). Take any of them.")
    for count, advice in ((3, " Repeat this with --repetitions 7 on an idle one."), (7, "")):
        make_busy(results, count)
        assert verdict(results)[-1].endswith(f"vary by 40% from round to round, as on a busy machine.{advice}")


def test_one_race_on_a_busy_machine_is_enough() -> None:
    calm, wide = [Measured(100, 99, 101)] * 3, [Measured(100, 60, 140)] * 2
    assert busy([calm, []], 3) == []
    (told,) = busy([calm, wide], 7)
    assert told == "The figures of one contestant vary by 80% from round to round, as on a busy machine."
