"""The training run: reproducible and learning; evaluation; the interface of schemes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from common.errors import PeerLost, PeerStalled, ProtocolError, UsageError  # noqa: E402
from common.launch.flags import TrainingConfig  # noqa: E402
from common.paddle_api.arena_binding import digest_of_model  # noqa: E402
from common.sync.local import LocalSynchronizer  # noqa: E402
from common.sync.synchronizer import Synchronizer  # noqa: E402
from common.trainer.data import load_dataset  # noqa: E402
from common.trainer.models import make_model  # noqa: E402
from common.trainer.record import RunRecord  # noqa: E402
from common.trainer.training import evaluate, train  # noqa: E402
from tests.support.small_training import SMALL, Half, run  # noqa: E402

DIGITS_A_STEP = 1440 // 480


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
    assert Synchronizer.__abstractmethods__ == {"attach", "mark_ready", "finish", "all_gather", "another", "close"}
    with pytest.raises(TypeError, match="abstract"):
        Synchronizer()  # type: ignore[abstract]


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
