"""A run's record has figures that fit together; the built-in models."""

from __future__ import annotations

import dataclasses
import json
import math
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

paddle = pytest.importorskip("paddle")

from common.errors import UsageError  # noqa: E402
from common.launch.flags import TrainingConfig  # noqa: E402
from common.paddle_api.arena_binding import digest_of_model  # noqa: E402
from common.sync.local import LocalSynchronizer  # noqa: E402
from common.trainer.entry import run_training  # noqa: E402
from common.trainer.models import make_model  # noqa: E402
from common.trainer.record import Quantiles, RunRecord  # noqa: E402
from common.trainer.report import TrainingProgress  # noqa: E402
from tests.support.small_training import SMALL, Half, run  # noqa: E402

# The record


def test_the_record_repeats_the_configuration(record: RunRecord) -> None:
    fields = ("scheme", "backend", "nranks", "servers", "model", "dataset", "batch_size", "optimizer", "learning_rate")
    found = [getattr(record, name) for name in fields]
    assert found == ["local", "none", 1, 0, "mnist-cnn", "digits", 32, "adam", 0.001]
    assert (record.seed, record.steps, record.warmup_steps) == (1, 45, 3)
    assert len(record.parameters_sha256) == 64


def test_every_figure_is_finite(record: RunRecord) -> None:
    numbers = list(numbers_in(record.to_json()))
    assert len(numbers) > 100
    assert all(math.isfinite(number) and number >= 0 for number in numbers)
    assert json.loads(json.dumps(record.to_json(), allow_nan=False))["steps"] == 45


def numbers_in(value: Any) -> Any:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from numbers_in(part)
    elif isinstance(value, (int, float)):
        yield value


def test_the_figures_fit_together(record: RunRecord) -> None:
    assert record.samples_per_s == pytest.approx(32 / (record.step_ms.p50 / 1e3))
    assert record.step_ms.p50 <= record.step_ms.p99
    assert set(record.phases_ms) == {"input", "forward", "backward", "wait", "sync"}
    assert record.phases_ms["wait"] == record.wait_ms.p50 == 0  # nobody else to wait for
    assert record.phases_ms["sync"] == record.sync_ms.p50 > 0
    assert max(record.phases_ms.values()) < record.step_ms.p99
    moments, losses = zip(*record.curve, strict=True)
    assert list(moments) == sorted(moments)
    assert (record.loss.first, record.loss.last) == (losses[0], losses[-1])


@pytest.mark.parametrize(("steps", "warmup", "expected"), [(1, 3, 0), (2, 3, 1), (5, 3, 3), (5, 0, 0), (5, 9, 4)])
def test_warm_up_leaves_one_step(steps: int, warmup: int, expected: int) -> None:
    record = run(dataclasses.replace(SMALL, steps=steps), warmup_steps=warmup, evaluate_model=False).record
    assert record.warmup_steps == expected
    assert record.step_ms.p50 > 0


def test_quantiles_are_milliseconds() -> None:
    seconds = [0.001 * i for i in range(1, 102)]
    assert Quantiles.of(seconds) == Quantiles(pytest.approx(51), pytest.approx(100))
    assert Quantiles.of([0.25]) == Quantiles(250, 250)
    assert Quantiles.of([]) == Quantiles(0, 0)


def test_run_training_prints_records_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep").mkdir()
    config = dataclasses.replace(SMALL, json=tmp_path / "deep" / "run.json", save=tmp_path / "model.pdparams")
    run_training(config, 0, lambda _: LocalSynchronizer())
    found = json.loads((tmp_path / "deep" / "run.json").read_text())
    model = make_model("mlp:16", seed=9)
    model.set_state_dict(paddle.load(str(config.save)))
    assert digest_of_model(model) == found["parameters_sha256"]
    out, err = capsys.readouterr()
    assert f"sha256 {found['parameters_sha256']}" in out
    assert "local over none, 1 rank\n" in out
    assert err == ""


def test_the_files_are_there_when_nobody_reads_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(_: RunRecord) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("common.trainer.report.print_summary", unread)
    config = dataclasses.replace(SMALL, json=tmp_path / "run.json", save=tmp_path / "model.pdparams", steps=1)
    with pytest.raises(BrokenPipeError):
        run_training(config, 0, lambda _: LocalSynchronizer())
    assert (tmp_path / "run.json").exists()
    assert (tmp_path / "model.pdparams").exists()


def test_only_rank_0_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Second(Half):
        def all_gather(self, values: np.ndarray) -> np.ndarray:
            return np.stack([values, values])

    run_training(dataclasses.replace(SMALL, json=tmp_path / "run.json", steps=1), 1, lambda _: Second(1))
    assert not (tmp_path / "run.json").exists()
    assert capsys.readouterr() == ("", "")


# The built-in models


@pytest.mark.parametrize(
    ("name", "count"),
    [("mnist-cnn", 520 + 10_020 + 9810), ("mlp", 784 * 256 + 256 + 2570), ("mlp:5", 3985), ("mlp:7,3", 5495 + 24 + 40)],
)
def test_sizes_of_models(name: str, count: int) -> None:
    model = make_model(name, seed=1)
    assert sum(p.size for p in model.parameters()) == count
    assert model(paddle.zeros([3, 1, 28, 28])).shape == [3, 10]


def test_models_depend_on_the_seed_alone() -> None:
    first, again, other = (digest_of_model(make_model("mnist-cnn", seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mlp:", r"hidden sizes of mlp must be numbers, as in mlp:1024,1024 \(got ''\)"),
        ("mlp:a", r"hidden sizes of mlp must be numbers, as in mlp:1024,1024 \(got 'a'\)"),
        ("mlp:3,", r"hidden sizes of mlp must be numbers, as in mlp:1024,1024 \(got '3,'\)"),
        ("mlp:3,0", r"hidden sizes of mlp must be at least 1 \(got '3,0'\)"),
        ("lenet", "unknown model 'lenet'"),
    ],
)
def test_models_that_cannot_be_made(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_model(name, seed=1)


def test_the_default_memory_is_aligned() -> None:
    arena = LocalSynchronizer().empty(97)
    assert (arena.shape, arena.dtype, arena.ctypes.data % 64) == ((97,), np.float32, 0)


@pytest.mark.parametrize(("staleness", "wait", "rate"), [(0, 900.0, 1), (1, 100.0, 2), (9, 0.0, 2), (None, 0.0, 2)])
def test_waiting_is_for_the_step_that_others_must_have_made(staleness: int | None, wait: float, rate: int) -> None:
    """Rank 0 is ready 1 s into each step of 2 s, rank 1 0.9 s later; with one step between, rank 0 is blocked by the
    step before, up to 0.1 s after it is ready, which is as long as these clocks say. Throughput is of each its own."""
    from common.trainer.timeline import Timeline, make_record

    class Pair(LocalSynchronizer):
        nranks = 2

        def all_gather(self, values: np.ndarray) -> np.ndarray:
            other = values.copy()
            other[0] = 4 * np.arange(values.shape[1])  # begins every 4 s
            other[4] = other[0] + 4
            other[3] = values[3] + (0.9 if staleness == 0 else 2.1 if staleness == 1 else 5)
            return np.stack([values, other])

    pair = Pair()
    pair.staleness = staleness
    begin = np.arange(0.0, 10.0, 2.0)
    timeline = Timeline(*(list(begin + after) for after in (0.0, 0.1, 0.5, 1.0, 1.95, 0.7)))
    timeline.end[-1] = 10.0
    record = make_record(TrainingConfig(batch_size=8), pair, timeline, 1, None, "digest")
    assert record.wait_ms.p50 == pytest.approx(wait)
    assert record.wait_ms.p50 + record.sync_ms.p50 == pytest.approx(950.0)
    assert record.samples_per_s == pytest.approx(2 * 8 / 2.0 if rate == 1 else 8 / 2.0 + 8 / 4.0)
    assert record.mode == "sync"


def test_no_loss_is_shown_before_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = StringIO()
    monkeypatch.setattr("common.trainer.report.Console", lambda: Console(file=shown, force_terminal=True))
    with TrainingProgress(0):
        pass
    assert "0/?" in shown.getvalue()
    assert "loss" not in shown.getvalue()
