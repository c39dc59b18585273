"""What the built-in training goes back to: all that a step changes, as it was after the step before."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from paddle import nn  # noqa: E402

from collective.algorithms.ring import RingAlgorithm  # noqa: E402
from collective.group import Group  # noqa: E402
from collective.synchronizer import RingSynchronizer  # noqa: E402
from collective.transports.threads import connect_threads  # noqa: E402
from common.commit.kept_parts import KEPT_VARIABLE, make_kept, path_of  # noqa: E402
from common.paddle_api.arena_binding import Binding, digest_of_model, layout_of, trainable  # noqa: E402
from common.paddle_api.random_states import random_arrays, set_random  # noqa: E402
from common.sync.boundaries import Boundaries  # noqa: E402
from common.system.process import JOINED_VARIABLE  # noqa: E402
from common.tensors.arena import Arena  # noqa: E402
from common.tensors.optimizers import make_optimizer  # noqa: E402
from common.trainer.step_copies import StepCopies, fill_arena  # noqa: E402


class Training:
    """A rank alone, of a model with BatchNorm and dropout, which draws random numbers of all kinds in each step."""

    def __init__(self) -> None:
        group = Group(RingAlgorithm(connect_threads(1)[0]), backend="threads")
        self.synchronizer = RingSynchronizer(group, connect=lambda _: group)
        self.boundaries = Boundaries(self.synchronizer, 5.0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1D(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.arena = Arena(layout_of(self.model), empty=self.synchronizer.empty)
        self.bound = Binding(trainable(self.model), self.arena, self.synchronizer.mark_ready)
        self.bound.fill_arena()
        self.bound.bind_parameters()
        self.synchronizer.attach(self.arena, make_optimizer("adam", {}))
        self.copies = StepCopies(self.boundaries, self.synchronizer, self.arena, self.model)

    def step(self, number: int) -> None:
        noise = random.random() + np.random.rand()
        self.synchronizer.announce(0.01)
        self.bound.begin()
        (self.model(paddle.randn([6, 4])).mean() * noise).backward()
        self.bound.complete_rest()
        self.synchronizer.finish(0.01)
        self.copies.after(number)

    def seen(self) -> tuple[str, list[bytes]]:
        buffers = [t.numpy().tobytes() for t in self.model.state_dict().values()]
        return digest_of_model(self.model), buffers


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Training]:
    before, memory = random_arrays(), make_kept()
    monkeypatch.setenv(KEPT_VARIABLE, path_of(memory))
    monkeypatch.setenv(JOINED_VARIABLE, str(tmp_path / "joined"))
    made = Training()
    yield made
    made.bound.close()
    os.close(memory)
    set_random(before)


@pytest.mark.filterwarnings("ignore:When training, we now always track")
def test_steps_that_are_made_again_end_where_they_ended(training: Training) -> None:
    training.copies.begin(None, 0)
    for number in (1, 2, 3):
        training.step(number)
    expected = training.seen()
    training.boundaries._forget_after(2)  # another rank has not come further
    boundary = training.boundaries.agree()
    assert boundary
    assert boundary.step == 2
    fill_arena(training.arena, boundary)
    training.copies.begin(boundary, 2)
    assert training.seen() != expected
    training.step(3)
    assert training.seen() == expected
