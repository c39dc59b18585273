"""`python -m benchmarks accuracy`: what it measures and refuses, over a pool's double, and once for real."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.contestants.table_of_trainings import Contestant
from benchmarks.flags.accuracy import AccuracyConfig
from benchmarks.measuring.run import measure
from benchmarks.records.compare import RankRecord
from benchmarks.records.result_files import plain
from benchmarks.training.judge import budget, samples_per_s
from benchmarks.training.watched import Straggler, Watch
from benchmarks.verbs import accuracy as module
from benchmarks.verbs.accuracy import Race, accuracy
from common.errors import CertificateFailed, UsageError
from common.launch.flags import TrainingConfig
from tests.support import warm
from tests.support.typed_results import rank_record, typed

CONFIG = AccuracyConfig(steps=4, eval_every=2, target=0.5, seeds="1,2", ps_modes="sync,async")


class PoolDouble:
    """Trains nothing: accuracy after k steps is k/8 x (1 + seed); a straggler makes each step take 3 s, not 1."""

    def __init__(self, ranks: int, servers: int, hosts: Any) -> None:
        self.order: list[tuple[int, str, str]] = []
        self.evaluated = 0
        type(self).last = self

    def __enter__(self) -> PoolDouble:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def digest(self, contestant: Contestant, rank: int, seed: int) -> str:
        return f"{contestant.name}" if contestant.mode == "async" else f"seed {seed}"

    def run(
        self, contestant: Contestant, config: TrainingConfig, *, watch: Watch | None = None, **_: Any
    ) -> list[RankRecord]:
        if watch is None:
            return []
        slow = watch.straggler.kind != "none"
        self.order.append((config.seed, watch.straggler.kind, contestant.name))
        own = 0.25 if contestant.mode == "async" else 0.0
        parameters = np.array([[2 + own, config.seed], [4 + own, config.seed]], np.float32)
        np.savez(watch.file, steps=[2, 4], later=np.array([0.0, 0.5]), parameters=parameters)
        common = {"scheme": contestant.scheme, "backend": contestant.backend, "mode": contestant.mode}
        common |= {"nranks": 2, "servers": contestant.servers, "seed": config.seed, "steps": 4, "warmup_steps": 3}
        curve = [[(3 if slow else 1) * (step + 1), 4.0 - step] for step in range(4)]
        return [
            rank_record(**common, curve=curve, parameters_sha256=self.digest(contestant, rank, config.seed))
            for rank in range(2)
        ]

    def evaluate(self, config: TrainingConfig, file: Path, rows: list[int]) -> list[float]:
        self.evaluated += len(rows)
        with np.load(file) as stored:
            return [float(step / 8 * (1 + seed)) for step, seed in stored["parameters"][rows]]


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> type[PoolDouble]:
    monkeypatch.setattr(module, "WorkerPool", PoolDouble)
    monkeypatch.setattr("benchmarks.records.environment.describe_environment", lambda: typed({}, "sweep").environment)
    return PoolDouble


def measured() -> dict[str, Any]:
    return plain(measure(Race(CONFIG), CONFIG.out, Console(file=StringIO()))[0])


def test_everyone_trains_under_every_straggler_with_every_seed_in_turn(doubled: type[PoolDouble]) -> None:
    results = measured()
    everyone = ["ps/shm N=2", "ps/shm N=2 async", "ring/shm N=2"]
    one_way = [(kind, name) for kind in ("none", "permanent", "random") for name in everyone]
    expected = [(1, *each) for each in one_way] + [(2, *each) for each in reversed(one_way)]
    assert doubled.last.order == expected  # type: ignore[attr-defined]
    assert len(results["runs"]) == 18
    assert results["schema"] == 1
    assert results["kind"] == "accuracy"
    assert results["certificate"] == {
        "passed": True,
        "contestants": ["ps/shm N=2", "ring/shm N=2"],
        "sha256": {"1": "seed 1", "2": "seed 2"},
    }


def test_a_run_holds_every_evaluation_and_the_time_to_the_target(doubled: type[PoolDouble]) -> None:
    runs = {(run["seed"], run["straggler"], run["contestant"]): run for run in measured()["runs"]}
    slow = runs[1, "random", "ps/shm N=2"]
    assert slow["points"] == [
        {"step": 2, "seconds": 6, "loss": 3.5, "accuracy": 0.5},
        {"step": 4, "seconds": 12.5, "loss": 1.5, "accuracy": 1.0},
    ]
    assert (slow["target_s"], slow["seconds"], slow["accuracy"]) == (6, 12.5, 1.0)
    assert runs[2, "none", "ring/shm N=2"]["target_s"] == 2


def test_equal_parameters_are_evaluated_once(doubled: type[PoolDouble]) -> None:
    """Of 18 trainings with 2 evaluations each, those of sync and ring, and here of async, are the same for a seed."""
    measured()
    assert doubled.last.evaluated == 2 * 2 * 2  # type: ignore[attr-defined]


def test_a_target_not_reached_has_no_time(doubled: type[PoolDouble], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubled, "evaluate", lambda self, config, file, rows: [0.4] * len(rows))
    assert {run["target_s"] for run in measured()["runs"]} == {None}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            lambda contestant, rank, seed: f"{contestant.scheme} {seed}",
            "with seed 1: after 4 measured steps ring/shm N=2 has other parameters than ps/shm N=2",
        ),
        (
            lambda contestant, rank, seed: f"rank {rank}" if contestant.mode == "async" else "same",
            "with seed 1: after 4 steps rank 1 of ps/shm N=2 async has other parameters than its rank 0",
        ),
    ],
)
def test_other_bits_than_they_must_have_end_it(
    doubled: type[PoolDouble], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: Any, text: str
) -> None:
    monkeypatch.setattr(doubled, "digest", lambda self, *args: wrong(*args))
    with pytest.raises(CertificateFailed, match=text) as failed:
        accuracy(AccuracyConfig(**{**vars(CONFIG), "out": tmp_path}))
    assert failed.value.exit_code == 3
    assert not (tmp_path / "accuracy.html").exists()


@pytest.mark.parametrize(
    ("mode", "kind", "nranks", "steps"),
    [
        ("sync", "permanent", 2, 180),
        ("ssp:2", "permanent", 2, 180),
        ("async", "none", 2, 180),
        ("async", "random", 2, 180),
        ("async", "permanent", 2, 280),  # 270 of rank 0 and 90 of the straggler are 2 x 180; then up to an evaluation
        ("geo:4", "permanent", 4, 220),  # 3 x 216 and 72 are 4 x 180
    ],
)
def test_where_nobody_waits_rank_0_makes_steps_for_the_straggler(mode: str, kind: str, nranks: int, steps: int) -> None:
    assert budget(Contestant("ps", "shm", nranks, 1, mode), Straggler(kind, 3.0), 180, 20) == steps


def test_samples_per_s_sums_what_each_rank_does_by_itself() -> None:
    fast = rank_record(warmup_steps=1, curve=[[1.0, 0], [2.0, 0], [3.0, 0]])
    slow = rank_record(warmup_steps=1, curve=[[3.0, 0], [6.0, 0], [9.0, 0]])
    assert samples_per_s([fast, slow], 30) == pytest.approx(30 + 10)
    assert samples_per_s([rank_record(warmup_steps=0, curve=[[2.0, 0]])], 30) == pytest.approx(15)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"straggler": "0.5x"}, "--straggler must be a factor above 1, as in 3x (got '0.5x')"),
        ({"straggler": "slow"}, "--straggler must be a factor above 1, as in 3x (got 'slow')"),
        ({"target": 97.0}, "--target must be a share of the test split, as in 0.97 (got 97)"),
        ({"eval_every": 5}, "--eval-every must be in 1..4, the --steps (got 5)"),
        ({"nranks": 1}, "--nranks must be at least 2"),
        ({"seeds": "1;2"}, "--seeds must be numbers separated by commas"),
        ({"ps_modes": "sync,asinc"}, "unknown mode 'asinc'; did you mean 'async'"),
        ({"data_plane": "auto"}, "unknown data plane 'auto'"),
    ],
)
def test_bad_flags_are_named(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as refused:
        AccuracyConfig(**{"steps": 4, "eval_every": 2, **flags})
    assert text in str(refused.value)


@pytest.mark.long
@pytest.mark.processes
def test_the_command_small_but_real(tmp_path: Path) -> None:
    pytest.importorskip("paddle")
    small = ["--model", "mlp:16", "--steps", "12", "--eval-every", "4", "--batch-size", "16", "--lr", "0.02"]
    flags = [*small, "--target", "0.5", "--seeds", "3", "--ps-modes", "sync,async", "--straggler", "10x"]
    done = warm.run(
        [sys.executable, "-m", "benchmarks", "accuracy", *flags, "--out", str(tmp_path), "--lang", "zh"],
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(str(tmp_path / "accuracy.html"))
    assert {path.name for path in tmp_path.iterdir()} == {"accuracy.json", "accuracy.md", "accuracy.html"}
    assert (tmp_path / "accuracy.md").read_text().startswith("# GradSync：达到指定准确率的时间")
    results = json.loads((tmp_path / "accuracy.json").read_text())
    assert len(results["runs"]) == 9
    for run in results["runs"]:
        evaluated = [point["step"] for point in run["points"]]
        longer = (run["mode"], run["straggler"]) == ("async", "permanent")
        assert evaluated[:3] == [4, 8, 12]
        assert max(evaluated) == (24 if longer else 12)  # with a straggler 10 times slower 21.8 of 24 are rank 0's
        times = [point["seconds"] for point in run["points"]]
        assert times == sorted(times)
        assert times[0] > 0
        assert all(0 <= point["accuracy"] <= 1 for point in run["points"])
        good = [point["seconds"] for point in run["points"] if point["accuracy"] >= 0.5]
        assert run["target_s"] == (good[0] if good else None)
    rates = {(run["contestant"], run["straggler"]): run["samples_per_s"] for run in results["runs"]}
    assert (
        rates["ring/shm N=2", "permanent"] < rates["ring/shm N=2", "none"]
    )  # 10 times slower, so noise cannot hide it
    assert all(run["accuracy"] > 0.3 for run in results["runs"] if run["mode"] == "sync")  # it has learned
    in_step = {run["parameters_sha256"] for run in results["runs"] if run["mode"] == "sync"}
    assert in_step == {results["certificate"]["sha256"]["3"]}
