"""Who is faster beyond noise, in reports of every kind: in each of seven rounds the ring is, by 5 %, on a machine whose
speed varies by three from one round to another, so that all intervals overlap."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from statistics import median
from typing import Any

import pytest
from msgspec import convert

from benchmarks.netlab.config import ClusterConfig
from benchmarks.operations.link_settings import Scheme
from benchmarks.records.crossover import Cell
from benchmarks.records.result_files import plain
from benchmarks.reports.crossover import winner
from benchmarks.reports.recommendation import grounds, recommend
from benchmarks.stats.agreement import agreement
from benchmarks.stats.interval import interval
from benchmarks.verbs.diff import changes, figures
from tests.support import compare_samples as compare
from tests.support import crossover_samples as crossover
from tests.support import sweep_samples as sweep
from tests.support.crossover_samples import cell
from tests.support.reporting import verdict
from tests.support.sweep_samples import row_of
from tests.support.typed_results import typed
from tests.unit.benchmarks import test_suite_report as suite
from tests.unit.benchmarks.test_interval import DRIFT

Results = dict[str, Any]
LEAD = 1.05


def measured_in(record: Results, name: str, rounds: Sequence[float]) -> Results:
    return {
        **record,
        name: median(rounds),
        f"{name}_interval": interval(rounds),
        f"{name}_rounds": list(rounds),
        "repetitions": len(rounds),
    }


def times(by: float) -> list[float]:
    return [100 * by * each for each in DRIFT]


def a_training() -> Results:
    ring, ps = (compare.a_run(f"{name}/shm N=2", 1000) for name in ("ring", "ps"))
    rates = [1e5 / each for each in times(1)], [1e5 / each for each in times(LEAD)]
    return compare.results_of(*(measured_in(run, "samples_per_s", r) for run, r in zip((ring, ps), rates, strict=True)))


def a_program() -> Results:
    results = suite.a_script()
    by = {"ring": 1, "ps": LEAD, "paddle": 1.5}
    results["runs"] = [measured_in(run, "step_ms", times(by[run["scheme"]])) for run in results["runs"]]
    return results


def a_sweep() -> Results:
    each = (("shm", 1), ("mpi", LEAD), ("memory-limit", 0.5))
    return sweep.results_of(*(row_of(name, 2, 1 << 20, times(by), 0, None) for name, by in each))


def a_map() -> Results:
    cluster = ClusterConfig(hosts=2, link="1gbit")
    return crossover.results_of(cell(cluster, 2, Scheme(1), 10**6, [1e8] * 7, times(1), times(LEAD)), repetitions=7)


ALL = (a_training, a_program, a_sweep, a_map)


def without_rounds(results: Results) -> Results:
    """As if nothing was known of them."""
    older = deepcopy(results)
    for records in (older.get("runs", []), older.get("rows", []), *older.get("cells", [])):
        for record in records.values() if isinstance(records, dict) else records:
            if isinstance(record, dict):
                for key in [key for key in record if key.endswith("_rounds")]:
                    del record[key]
    return older


def test_of_a_training() -> None:
    told = "\n".join(verdict(a_training()))
    assert "N=2: ring/shm (556 samples/s) is the fastest, 5.0% ahead of ps/shm (529)." in told
    assert "within noise of each other" in "\n".join(verdict(without_rounds(a_training())))


def test_of_a_program() -> None:
    told = "\n".join(verdict(a_program()))
    assert "ring/shm is the fastest with 180.0 ms a step; ps/shm 189.0 ms (5.0% slower)" in told
    older = "\n".join(verdict(without_rounds(a_program())))
    assert "ring/shm has the lowest median, 180.0 ms a step; ps/shm 189.0 ms (within noise of it)" in older


def test_of_a_sweep() -> None:
    told = "\n".join(verdict(a_sweep()))
    assert "1.05 times faster than mpi" in told
    assert "within noise of mpi" in "\n".join(verdict(without_rounds(a_sweep())))


def test_of_a_map() -> None:
    assert winner(typed(a_map()).cells[0]) == "ring"
    assert winner(typed(without_rounds(a_map())).cells[0]) == ""


def test_of_a_map_that_was_interrupted_in_mid_round() -> None:
    cluster = ClusterConfig(hosts=2, link="1gbit")
    found = cell(cluster, 2, Scheme(1), 10**6, [1e8] * 8, [*times(1), 1e6], times(LEAD))
    assert (found["rounds"], winner(convert(found, Cell))) == (7, "ring")
    assert found["ring"]["time_ms_interval"][1] < 1e6


def test_of_a_job() -> None:
    environment = typed(a_training()).environment
    parts = [("A", typed(a_training())), ("B", typed(a_program()))]
    told = [*recommend(parts, environment), *grounds(parts, environment)]
    assert (
        told[0].endswith("It is faster in 2 of 2 comparisons on several ranks, by 5% (B, N=2).") or "by 5%" in told[0]
    )
    assert "1.50 times as fast (B, N=2)" in told[2]
    assert "two equals look apart in 1 of 64 cases" in told[1]
    older = recommend([("A", typed(without_rounds(a_training())))], environment)
    assert "the two are within noise of each other" in older[0]


@pytest.mark.parametrize("make", ALL)
def test_results_hold_their_rounds(make: Any) -> None:
    assert typed(plain(typed(make()))) == typed(make())
    assert "_rounds" in str(plain(typed(make())))
    assert "_rounds" not in str(without_rounds(make()))


@pytest.mark.parametrize("make", ALL)
def test_another_winner_in_another_run_is_told_though_intervals_overlap(make: Any) -> None:
    mine = figures(typed(make()))
    names = [name for name in mine if mine[name].race][:2]
    one, other = (mine[name] for name in names)
    swapped = dict(mine) | dict(zip(names, (other, one), strict=True))
    assert agreement(mine, mine).flipped == []
    assert agreement(mine, swapped).flipped == [tuple(names)]
    assert {change.verdict for change in changes(mine, swapped) if change.what in names} == {"within noise"}
