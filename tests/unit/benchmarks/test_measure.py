"""Repetitions in turn, and their summary."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.flags.compare import CompareConfig
from benchmarks.training.contestants import Contestant
from benchmarks.training.measure import Records, measure, records_from, records_to_json, summarise
from common.errors import CertificateFailed
from common.launch.config import TrainingConfig

A, B, C = Contestant("ps", "grpc", 2, 1), Contestant("ring", "shm", 2), Contestant("local", "none", 1)


class PoolDouble:
    def __init__(self) -> None:
        self.order: list[str] = []
        self.evaluated: list[str] = []

    def run(self, contestant: Contestant, config: TrainingConfig, *, evaluate: bool, **_: Any) -> list[dict[str, Any]]:
        self.order.append(contestant.name)
        self.evaluated += [contestant.name] * evaluate
        same = {"parameters_sha256": "a", "steps": config.steps}
        return [{"number": len(self.order), **same}, {"number": "of another rank", **same}]


def record(rate: float) -> dict[str, Any]:
    times = {"p50": 1000 / rate, "p99": 2000 / rate}
    return {
        "samples_per_s": rate,
        **dict.fromkeys(("step_ms", "sync_ms", "wait_ms"), times),
        "phases_ms": {"input": 0.1, "sync": 100 / rate},
        "accuracy": 0.9,
    }


def test_rounds_alternate_in_direction() -> None:
    pool = PoolDouble()
    told: list[str] = []
    records: Records = {}
    config = CompareConfig(steps=4, repetitions=3)
    measure(pool, [A, B], config, records=records, rounds=range(3), on_run=told.append)  # type: ignore[arg-type]
    assert pool.order == [A.name, B.name, B.name, A.name, A.name, B.name]
    assert [r["number"] for r in records[A]] == [1, 4, 5]
    assert pool.evaluated == [A.name, B.name]  # once: all repetitions end in the same bits
    assert told[0] == "round 1 of 3: ps/grpc N=2"
    assert len(told) == 6


def test_records_that_were_kept_are_gone_on_from() -> None:
    pool = PoolDouble()
    config = CompareConfig(steps=4, repetitions=3)
    kept = {c.name: [{"number": 0, "parameters_sha256": "a"}] for c in (A, B)}
    records = records_from(json.loads(json.dumps(kept)), [A, B, C])
    measure(pool, [A, B], config, records=records, rounds=range(1, 3), on_run=str)  # type: ignore[arg-type]
    assert pool.order == [B.name, A.name, A.name, B.name]
    assert pool.evaluated == []  # the first one was
    assert {c.name: [r["number"] for r in mine] for c, mine in records.items()} == {
        A.name: [0, 2, 3],
        B.name: [0, 1, 4],
    }
    assert records_to_json(records)[A.name] == records[A]


def test_ranks_that_end_with_different_parameters_are_no_result() -> None:
    class Diverging(PoolDouble):
        def run(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
            mine, other = super().run(*args, **kwargs)
            return [mine, {**other, "parameters_sha256": "b"}]

    config = CompareConfig(steps=4, repetitions=1)
    text = "after 4 measured steps rank 1 of ps/grpc N=2 has other parameters than its rank 0"
    with pytest.raises(CertificateFailed, match=f"^{text}$"):
        measure(Diverging(), [A], config, records={}, rounds=range(1), on_run=str)  # type: ignore[arg-type]


def test_summary_has_medians_and_the_spread() -> None:
    found = summarise(A, [record(100), record(400), record(200)])
    assert found["contestant"] == "ps/grpc N=2"
    assert found["samples_per_s"] == 200
    assert found["samples_per_s_interval"] == [100, 400]
    assert found["step_ms"] == {"p50": 5, "p99": 10}
    assert found["phases_ms"]["sync"] == 0.5
    assert found["repetitions"] == 3
    assert found["accuracy"] == 0.9
