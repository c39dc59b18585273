"""The training step that both schemes wrap, and the run that repeats it and reports."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import paddle
from paddle.nn import functional

from common.commit.folder import say
from common.errors import LayoutMismatch, PeerError, PeerUnreachable
from common.launch.flags import TrainingConfig
from common.paddle_api.arena_binding import Binding, digest_of_model, layout_of, trainable
from common.sync.boundaries import Boundaries, Boundary
from common.sync.clocks import compare_clocks
from common.sync.guard import Guard
from common.sync.synchronizer import Synchronizer
from common.system.fault_points import reach
from common.system.memory import give_memory_back
from common.tensors.arena import Arena
from common.trainer.commits import commits_of
from common.trainer.data import Dataset, Split, batches_of, load_dataset, rank_indices
from common.trainer.models import make_model
from common.trainer.record import RunRecord
from common.trainer.step_copies import StepCopies, fill_arena
from common.trainer.timeline import Timeline, make_record

__all__ = ["TrainedModel", "evaluate", "train"]

WARMUP_STEPS = 3
EVALUATION_BATCH = 500
FLAGS_BYTES = 256


def unobserved(step: int, total: int, loss: float) -> None:
    """What `train` calls after each step unless told otherwise."""


@dataclass(frozen=True)
class TrainedModel:
    """What `train` leaves: the model, and the run record (the same on every rank)."""

    model: Any
    record: RunRecord


def train(
    config: TrainingConfig,
    synchronizer: Synchronizer,
    *,
    warmup_steps: int = WARMUP_STEPS,
    evaluate_model: bool = True,
    data: Dataset | None = None,
    on_step: Callable[[int, int, float], None] = unobserved,
) -> TrainedModel:
    """Train as `config` says with whatever scheme `synchronizer` is; it is left attached and open.

    Args:
        warmup_steps: left out of the timings (as many as leave one step).
        data: the data set, if it is loaded already.
        on_step: called after every step with (steps done, steps in all, this rank's loss).

    Raises:
        DataError, UsageError: before the first step. PeerError, ProtocolError, NonFiniteGradient: during it.
    """
    data = data or load_dataset(config.dataset, config.data_dir, seed=config.seed)
    with Boundaries(synchronizer, config.wait_limit) as boundaries:
        while True:
            try:
                return train_in_one_group(config, synchronizer, boundaries, data, warmup_steps, evaluate_model, on_step)
            except (PeerError, PeerUnreachable) as exc:
                boundaries.leave(exc)
            give_memory_back()  # the arena's, which the exception had held
            boundaries.rejoin()


def train_in_one_group(
    config: TrainingConfig,
    synchronizer: Synchronizer,
    boundaries: Boundaries,
    data: Dataset,
    warmup_steps: int,
    evaluate_model: bool,
    on_step: Callable[[int, int, float], None],
) -> TrainedModel:
    """Train from the beginning, from a commit, or from where the group before this one has come to, to the end."""
    rolled_back = boundaries.agree()

    def indices_with(nranks: int, rank: int = 0) -> tuple[int, Iterator[list[int]]]:
        return rank_indices(len(data.train), batch_size=config.batch_size, rank=rank, nranks=nranks)

    steps_per_epoch, indices = indices_with(synchronizer.nranks, synchronizer.rank)
    model = make_model(config.model, seed=config.seed)
    arena, bound = filled_arena(model, synchronizer, rolled_back)
    timeline = Timeline()
    with commits_of(config, synchronizer, lambda nranks: indices_with(nranks)[0]) as commits:
        commits.prepare(arena, [p.name for _, p in bound.named], at=rolled_back.step if rolled_back else None)
        bound.bind_parameters()
        synchronizer.guard = Guard(arena, synchronizer.rank, refuses=config.non_finite != "warn")
        synchronizer.attach(arena, config.make_optimizer())
        check_same_flags(config, synchronizer)
        compare_clocks(synchronizer)
        commits.restore()
        copies = StepCopies(boundaries, synchronizer, arena, model)
        copies.begin(rolled_back, commits.first)
        ahead = commits.ahead
        total = config.total_steps(steps_per_epoch, ahead)
        if commits.first >= total and synchronizer.rank == 0:
            say(f"nothing is left to train: {commits.first:,} steps are made, {total:,} were asked for")
        if rolled_back and rolled_back.step:
            commits.after(rolled_back.step, (rolled_back.step - ahead) // steps_per_epoch)  # it may have been under way
        del rolled_back
        batches = batches_of(data.train, islice(indices, commits.first - ahead, None))
        for step in range(commits.first, total):
            with naming_the_step(step, total):
                loss = take_step(model, batches, bound, synchronizer, config.lr, timeline)
            timeline.loss.append(float(loss))
            copies.after(step + 1)
            commits.after(step + 1, (step + 1 - ahead) // steps_per_epoch)
            on_step(step + 1, total, timeline.loss[-1])
        with naming_the_step(total - 1, total):
            synchronizer.settle()
            commits.finish()
    accuracy = evaluate(model, data.test, synchronizer) if evaluate_model else None
    record = make_record(
        config,
        synchronizer,
        timeline,
        max(0, min(warmup_steps, len(timeline.end) - 1)),
        accuracy,
        digest_of_model(model),
    )
    bound.close()
    return TrainedModel(model, record)


def filled_arena(model: Any, synchronizer: Synchronizer, boundary: Boundary | None) -> tuple[Arena, Binding]:
    """With the model's parameters or those of the boundary, which servers take from rank 0 at `attach`."""
    arena = Arena(layout_of(model), empty=synchronizer.empty)
    bound = Binding(trainable(model), arena, synchronizer.mark_ready)
    bound.fill_arena()
    if boundary is not None:
        fill_arena(arena, boundary)
    return arena, bound


def take_step(
    model: Any, batches: Iterator[Any], bound: Binding, synchronizer: Synchronizer, rate: float, timeline: Timeline
) -> Any:
    """Input, forward, backward, synchronisation; returns the loss, of which nothing has been read yet."""
    timeline.begin.append(time.monotonic())
    images, labels = (paddle.to_tensor(part) for part in next(batches))
    timeline.input_done.append(time.monotonic())
    loss = functional.cross_entropy(model(images), labels)
    timeline.forward_done.append(time.monotonic())
    synchronizer.announce(rate)
    bound.begin()
    loss.backward()
    bound.complete_rest()
    reach("backward", len(timeline.ready))
    timeline.ready.append(time.monotonic())
    timeline.tell(synchronizer.trace)
    synchronizer.finish(rate)
    timeline.end.append(time.monotonic())
    return loss


def check_same_flags(config: TrainingConfig, synchronizer: Synchronizer) -> None:
    """Ranks started by hand may have been given different flags.

    Raises:
        LayoutMismatch: naming the first one.
    """
    names = ("dataset", "batch_size", "steps", "epochs", "seed", "commit_every")
    values = [*(getattr(config, name) for name in names), "on" if config.trace else "off"]
    mine = json.dumps(values).encode().ljust(FLAGS_BYTES)
    everyone = synchronizer.all_gather(np.frombuffer(mine, np.uint8))
    first, *others = (json.loads(row.tobytes()) for row in everyone)
    for rank, theirs in enumerate(others, 1):
        for name, a, b in zip((*names, "trace"), first, theirs, strict=True):
            if a != b:
                flag = name.replace("_", "-")
                raise LayoutMismatch(
                    f"rank 0 and rank {rank} disagree on --{flag}: {a} against {b}; give all ranks the same flags"
                )


@contextmanager
def naming_the_step(step: int, total: int) -> Iterator[None]:
    """What happens to other processes is told with where this one was."""
    try:
        yield
    except (PeerError, PeerUnreachable) as exc:
        raise type(exc)(f"{exc} [in step {step:,} of {total:,} of this rank]") from exc


def evaluate(model: Any, split: Split, synchronizer: Synchronizer) -> float:
    """Share of `split` that the model classifies rightly, 0..1; every rank takes its part."""
    model.eval()
    right = 0
    mine = np.arange(synchronizer.rank, len(split), synchronizer.nranks)
    with paddle.no_grad():
        for begin in range(0, len(mine), EVALUATION_BATCH):
            part = mine[begin : begin + EVALUATION_BATCH]
            guess = model(paddle.to_tensor(split.images[part])).numpy().argmax(1)
            right += int((guess == split.labels[part]).sum())
    model.train()
    return float(synchronizer.all_gather(np.array([right], np.int64)).sum()) / len(split)
