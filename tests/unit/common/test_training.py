"""The training run: reproducible, learning, and with a record whose figures fit together."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from common.errors import PeerLost, PeerStalled, ProtocolError, UsageError  # noqa: E402
from common.launch.config import TrainingConfig  # noqa: E402
from common.paddle_api.binding import digest_of_model  # noqa: E402
from common.sync.local import LocalSynchronizer  # noqa: E402
from common.sync.synchronizer import Synchronizer  # noqa: E402
from common.trainer.data import load_dataset  # noqa: E402
from common.trainer.entry import run_training  # noqa: E402
from common.trainer.models import make_model  # noqa: E402
from common.trainer.record import Quantiles, RunRecord  # noqa: E402
from common.trainer.training import TrainedModel, evaluate, train  # noqa: E402

SMALL = TrainingConfig(model="mlp:16", batch_size=480, steps=5, lr=0.01)  # 3 steps an epoch
DIGITS_A_STEP = 1440 // 480


def run(config: TrainingConfig = SMALL, **options: Any) -> TrainedModel:
    with LocalSynchronizer() as synchronizer:
        return train(config, synchronizer, **options)


@pytest.fixture(scope="module")
def record() -> RunRecord:
    """Of an epoch of the digits; tests only read it."""
    return run(TrainingConfig(model="mnist-cnn", batch_size=32)).record


class Half(LocalSynchronizer):
    """One of two ranks that never hears of the other."""

    nranks = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.told: list[int] = []

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        self.told.append(int(values[0]))
        return np.stack([values, values * 0])


class Failing(LocalSynchronizer):
    """Raises in the given step's `finish`."""

    def __init__(self, error: Exception, step: int) -> None:
        self.error, self.steps_left = error, step

    def finish(self, learning_rate: float) -> None:
        if self.steps_left == 0:
            raise self.error
        self.steps_left -= 1
        super().finish(learning_rate)


# Training


def test_the_same_seed_gives_the_same_bits() -> None:
    first, again = run().record, run().record
    assert first.parameters_sha256 == again.parameters_sha256
    assert [loss for _, loss in first.curve] == [loss for _, loss in again.curve]


def test_other_settings_give_other_bits() -> None:
    variants = [SMALL, *(dataclasses.replace(SMALL, **{k: v}) for k, v in [("seed", 2), ("lr", 0.02), ("steps", 4)])]
    assert len({run(config).record.parameters_sha256 for config in variants}) == 4


@pytest.mark.parametrize("overlap", [True, False])
def test_the_local_scheme_is_ordinary_training(overlap: bool) -> None:
    model = make_model("mlp:16", seed=1)
    optimizer = paddle.optimizer.Adam(0.01, parameters=model.parameters())
    data = load_dataset("digits").train
    sampler = paddle.io.DistributedBatchSampler(range(1440), 480, num_replicas=1, rank=0, shuffle=True, drop_last=True)
    losses = []
    for _ in range(2):
        for indices in sampler:
            logits = model(paddle.to_tensor(data.images[indices]))
            loss = paddle.nn.functional.cross_entropy(logits, paddle.to_tensor(data.labels[indices]))
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
    record = run(dataclasses.replace(SMALL, steps=2 * DIGITS_A_STEP, overlap=overlap)).record
    assert record.parameters_sha256 == digest_of_model(model)
    assert [loss for _, loss in record.curve] == losses


def test_steps_run_on_over_the_ends_of_epochs() -> None:
    record = run(dataclasses.replace(SMALL, steps=2 * DIGITS_A_STEP + 1)).record
    assert record.steps == len(record.curve) == 2 * DIGITS_A_STEP + 1
    epochs = run(dataclasses.replace(SMALL, steps=None, epochs=2)).record
    assert epochs.steps == 2 * DIGITS_A_STEP
    assert [loss for _, loss in epochs.curve] == [loss for _, loss in record.curve[:-1]]


def test_the_digits_are_learned(record: RunRecord) -> None:
    losses = [loss for _, loss in record.curve]
    assert 2 < losses[0] < 3
    assert np.mean(losses[-10:]) < losses[0] / 4
    assert record.accuracy is not None
    assert record.accuracy > 0.85


def test_the_trained_model_is_evaluated_and_has_the_digest_of_the_record() -> None:
    trained = run()
    assert digest_of_model(trained.model) == trained.record.parameters_sha256
    assert trained.record.accuracy == accuracy_of(trained.model)


def accuracy_of(model: Any) -> float:
    """In one piece."""
    test = load_dataset("digits").test
    model.eval()
    guess = model(paddle.to_tensor(test.images)).numpy().argmax(1)
    return float(np.mean(guess == test.labels))


def test_progress_is_told_after_every_step() -> None:
    told: list[tuple[int, int, float]] = []
    record = run(on_step=lambda *progress: told.append(progress)).record
    assert told == [(i + 1, 5, loss) for i, (_, loss) in enumerate(record.curve)]


@pytest.mark.parametrize("kind", [PeerLost, PeerStalled])
def test_what_happens_to_a_peer_is_told_with_the_step(kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught, Failing(kind("rank 3 was lost"), step=2) as synchronizer:
        train(SMALL, synchronizer)
    assert type(caught.value) is kind
    assert str(caught.value) == "rank 3 was lost [in step 2 of 5 of this rank]"


@pytest.mark.parametrize("error", [ProtocolError("wrong"), KeyError("bug")])
def test_other_errors_come_through_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, Failing(error, step=0) as synchronizer:
        train(SMALL, synchronizer)
    assert caught.value is error


def test_too_large_a_batch_is_refused_before_the_first_step() -> None:
    with pytest.raises(UsageError, match="1 ranks of --batch-size 1441 need 1,441 samples"):
        run(dataclasses.replace(SMALL, batch_size=1441))


# Evaluation


def test_evaluation_equals_direct_computation() -> None:
    model = make_model("mlp:16", seed=3)
    found = evaluate(model, load_dataset("digits").test, LocalSynchronizer())
    assert model.training
    assert found == accuracy_of(model)
    assert 0 < found < 1


def test_two_ranks_share_the_evaluation() -> None:
    model, test = make_model("mlp:16", seed=3), load_dataset("digits").test
    halves = [Half(rank) for rank in range(2)]
    shares = [evaluate(model, test, half) for half in halves]
    right = [half.told[0] for half in halves]
    assert sum(right) == round(accuracy_of(model) * 357)
    assert shares == [count / 357 for count in right]
    assert min(right) > 0


def test_evaluation_leaves_dropout_out() -> None:
    paddle.seed(1)
    model = paddle.nn.Sequential(paddle.nn.Dropout(0.9), make_model("mlp:16", seed=3))
    test = load_dataset("digits").test
    assert evaluate(model, test, LocalSynchronizer()) == accuracy_of(model[1])


def test_without_evaluation_there_is_no_accuracy() -> None:
    assert run(evaluate_model=False).record.accuracy is None


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
    config = dataclasses.replace(SMALL, json=tmp_path / "deep" / "run.json", save=tmp_path / "model.pdparams")
    run_training(config, LocalSynchronizer)
    found = json.loads((tmp_path / "deep" / "run.json").read_text())
    model = make_model("mlp:16", seed=9)
    model.set_state_dict(paddle.load(str(config.save)))
    assert digest_of_model(model) == found["parameters_sha256"]
    out, err = capsys.readouterr()
    assert f"sha256 {found['parameters_sha256']}" in out
    assert "local over none, 1 rank\n" in out
    assert err == ""


def test_only_rank_0_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Second(Half):
        def all_gather(self, values: np.ndarray) -> np.ndarray:
            return np.stack([values, values])

    run_training(dataclasses.replace(SMALL, json=tmp_path / "run.json", steps=1), lambda: Second(1))
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


# The interface


def test_a_synchronizer_tells_the_others_why_it_leaves() -> None:
    class Recording(LocalSynchronizer):
        reasons: list[str] = []  # noqa: RUF012

        def close(self, reason: str = "") -> None:
            self.reasons.append(reason)

    with Recording():
        pass
    with pytest.raises(ValueError, match="what happened"), Recording():
        raise ValueError("what happened")
    assert Recording.reasons == ["", "ValueError: what happened"]


def test_the_interface_cannot_be_left_unfinished() -> None:
    assert Synchronizer.__abstractmethods__ == {"attach", "mark_final", "finish", "all_gather", "close"}
    with pytest.raises(TypeError, match="abstract"):
        Synchronizer()  # type: ignore[abstract]


def test_the_default_memory_is_aligned() -> None:
    arena = LocalSynchronizer().empty(97)
    assert (arena.shape, arena.dtype, arena.ctypes.data % 64) == ((97,), np.float32, 0)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("seed", 2, "--seed: 1 against 2"),
        ("batch_size", 8, "--batch-size: 32 against 8"),
        ("steps", 9, "--steps: None against 9"),
        ("trace", Path("t.json"), "--trace: off against on"),
    ],
)
def test_ranks_with_other_flags_are_refused(field: str, value: object, text: str) -> None:
    from dataclasses import replace

    from collective.synchronizer import RingSynchronizer
    from common.errors import LayoutMismatch
    from common.trainer.training import check_same_flags
    from tests.support.groups import mesh_groups, on_threads

    groups = mesh_groups("memory", 2)

    def body(rank: int) -> str:
        config = TrainingConfig() if rank == 0 else replace(TrainingConfig(), **{field: value})
        with pytest.raises(LayoutMismatch) as caught:
            check_same_flags(config, RingSynchronizer(groups[rank]))
        return str(caught.value)

    for told in on_threads(2, body):
        assert told == f"rank 0 and rank 1 disagree on {text}; give all ranks the same flags"


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


@pytest.mark.parametrize(("blocked", "wait", "sync"), [(0.0, 50, 0), (0.03, 80, 0), (0.3, 100, 250)])
def test_what_forward_is_blocked_is_no_forward(blocked: float, wait: float, sync: float) -> None:
    """The other rank is ready 0.2 s after this one, and so 0.05 s after this one's next forward has begun."""
    from common.trainer.training import Timeline, make_record

    class Pair(LocalSynchronizer):
        nranks = 2

        def all_gather(self, values: np.ndarray) -> np.ndarray:
            other = values.copy()
            other[3] = values[3] + 0.2
            return np.stack([values, other])

    begin = np.arange(0.0, 5.0)
    moments = (list(begin + after) for after in (0.0, 0.05, 0.5, 0.9, 0.95, 0.7))
    timeline = Timeline(*moments, awaited=[0.0, *[blocked] * 4])
    record = make_record(TrainingConfig(batch_size=8), Pair(), timeline, 1, None, "digest")
    found = record.phases_ms
    assert found["forward"] == pytest.approx(450 - 1e3 * blocked)
    assert (found["wait"], found["sync"]) == (pytest.approx(wait), pytest.approx(sync))
    assert sum(found.values()) == pytest.approx(950)
