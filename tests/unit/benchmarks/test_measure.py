"""Repetitions in turn, and their summary."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.contestants.table_of_trainings import Contestant
from benchmarks.flags.compare import CompareConfig
from benchmarks.records.compare import Quantiles, RankRecord
from benchmarks.training.measure import Records, measure_round, records_from, records_to_json, summarise
from common.errors import CertificateFailed
from common.launch.flags import TrainingConfig
from tests.support.typed_results import rank_record

A, B, C = Contestant("ps", "grpc", 2, 1), Contestant("ring", "shm", 2), Contestant("local", "none", 1)


class PoolDouble:
    def __init__(self) -> None:
        self.order: list[str] = []
        self.evaluated: list[str] = []

    def run(self, contestant: Contestant, config: TrainingConfig, *, evaluate: bool, **_: Any) -> list[RankRecord]:
        self.order.append(contestant.name)
        self.evaluated += [contestant.name] * evaluate
        same = {"parameters_sha256": "a", "steps": config.steps}
        return [rank_record(seed=len(self.order), **same), rank_record(seed=99, **same)]


def record(rate: float) -> RankRecord:
    times = {"p50": 1000 / rate, "p99": 2000 / rate}
    return rank_record(
        samples_per_s=rate,
        **dict.fromkeys(("step_ms", "sync_ms", "wait_ms"), times),
        phases_ms={"input": 0.1, "sync": 100 / rate},
        accuracy=0.9,
    )


def measure(
    pool: PoolDouble,
    contestants: list[Contestant],
    config: CompareConfig,
    *,
    records: Records,
    rounds: Any,
    on_run: Any,
) -> None:
    for number in rounds:
        measure_round(
            pool,
            contestants,
            number,
            training_of=config.for_ranks,
            warmup_steps=config.warmup_steps,
            trace=None,
            records=records,
            on_run=on_run,
            where=f"round {number + 1} of {config.repetitions}",
        )


def test_rounds_alternate_in_direction() -> None:
    pool = PoolDouble()
    told: list[str] = []
    records: Records = {}
    config = CompareConfig(steps=4, repetitions=3)
    measure(pool, [A, B], config, records=records, rounds=range(3), on_run=told.append)
    assert pool.order == [A.name, B.name, B.name, A.name, A.name, B.name]
    assert [r.seed for r in records[A]] == [1, 4, 5]
    assert pool.evaluated == [A.name, B.name]  # once: all repetitions end in the same bits
    assert told[0] == "round 1 of 3: ps/grpc N=2"
    assert len(told) == 6


def test_records_that_were_kept_are_gone_on_from() -> None:
    pool = PoolDouble()
    config = CompareConfig(steps=4, repetitions=3)
    kept = records_to_json({c: [rank_record(seed=0, parameters_sha256="a")] for c in (A, B)})
    records = records_from(json.loads(json.dumps(kept)), [A, B, C])
    measure(pool, [A, B], config, records=records, rounds=range(1, 3), on_run=str)
    assert pool.order == [B.name, A.name, A.name, B.name]
    assert pool.evaluated == []  # the first one was
    assert {c.name: [r.seed for r in mine] for c, mine in records.items()} == {
        A.name: [0, 2, 3],
        B.name: [0, 1, 4],
    }
    assert records_from(records_to_json(records), [A])[A] == records[A]


def test_ranks_that_end_with_different_parameters_are_no_result() -> None:
    class Diverging(PoolDouble):
        def run(self, *args: Any, **kwargs: Any) -> list[RankRecord]:
            mine, other = super().run(*args, **kwargs)
            return [mine, replace(other, parameters_sha256="b")]

    config = CompareConfig(steps=4, repetitions=1)
    text = "after 4 measured steps rank 1 of ps/grpc N=2 has other parameters than its rank 0"
    with pytest.raises(CertificateFailed, match=f"^{text}$"):
        measure(Diverging(), [A], config, records={}, rounds=range(1), on_run=str)


def test_summary_has_medians_and_the_spread() -> None:
    found = summarise(A, [record(100), record(400), record(200)])
    assert found.contestant == "ps/grpc N=2"
    assert found.samples_per_s == 200
    assert found.samples_per_s_interval == (100, 400)
    assert found.step_ms == Quantiles(5, 10)
    assert found.phases_ms["sync"] == 0.5
    assert found.repetitions == 3
    assert found.accuracy == 0.9
