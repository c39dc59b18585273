"""`TrainingState` of one rank in this process; with several ranks and kills see tests/processes/test_resume.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")
from paddle import nn  # noqa: E402

import collective  # noqa: E402
import ps  # noqa: E402
from collective.algorithms.ring import RingAlgorithm  # noqa: E402
from collective.group import Group  # noqa: E402
from collective.synchronizer import RingSynchronizer  # noqa: E402
from collective.transports.threads import connect_threads  # noqa: E402
from common.commit.__main__ import main  # noqa: E402
from common.commit.folder import CommitFolder  # noqa: E402
from common.commit.kept_parts import KEPT_VARIABLE, has_kept, make_kept, path_of  # noqa: E402
from common.errors import CommitCorrupt, PeerLost, UsageError  # noqa: E402
from common.paddle_api import training_state  # noqa: E402
from common.paddle_api.arena_binding import digest_of_model  # noqa: E402
from common.paddle_api.random_states import random_arrays, set_random  # noqa: E402
from common.paddle_api.training_state import TrainingState, plain_or_array  # noqa: E402
from common.paddle_api.wrapped_models import WrappedModels  # noqa: E402
from common.sync.local import LocalSynchronizer  # noqa: E402
from common.system.next_epoch import WORD_VARIABLE, Word  # noqa: E402
from common.system.process import JOB_SECRET_VARIABLE, JOINED_VARIABLE, RESTARTS_VARIABLE  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track")  # of BatchNorm
BATCHES = list(np.random.default_rng(1).random((4, 8, 6), np.float32))


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = random_arrays()
    yield
    set_random(before)


class Scaler:
    """What a GradScaler keeps, where one has an effect, which is on GPUs only."""

    def __init__(self) -> None:
        self.scale, self.good = np.float32([64]), 0

    def update(self) -> None:
        self.good += 1
        if self.good == 3:
            self.scale, self.good = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "incr_count": self.good, "use_dynamic_loss_scaling": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.good = np.float32([state["scale"][0]]), state["incr_count"]


class Program:
    """A user's: two epochs of four batches, a commit every three steps."""

    def __init__(self, folder: Path, *, width: int = 5, ranks: int = 1, **options: Any) -> None:
        paddle.seed(1)
        with paddle.utils.unique_name.guard():  # as in a process of its own
            self.model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1D(width), nn.Dropout(0.3), nn.Linear(width, 2))
            self.schedule = paddle.optimizer.lr.StepDecay(0.1, 2)
            self.optimizer = paddle.optimizer.Adam(self.schedule, parameters=self.model.parameters())
        self.scaler = Scaler()
        alone = LocalSynchronizer()
        alone.nranks = ranks
        objects = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler, **options}
        self.state = TrainingState(**objects, checkpoint_dir=folder, commit_every=3, joined=lambda: alone)

    def run(self, last: int = 8) -> str:
        """Up to so many steps; the digest of all that counts."""
        with paddle.utils.unique_name.guard():
            return self._run(last)

    def _run(self, last: int) -> str:
        for _, batch in self.state.steps(BATCHES, epochs=2):
            (self.model(paddle.to_tensor(batch)).square().mean() * self.scaler.scale[0]).backward()
            self.optimizer.step()
            self.scaler.update()
            self.optimizer.clear_grad()
            self.schedule.step()
            if self.state.step == last:
                break
        self.state._finish()
        buffers = [t.numpy().tolist() for t in self.model.state_dict().values()]
        moments = [t.numpy().tolist() for t in self.optimizer.state_dict().values() if hasattr(t, "numpy")]
        drawn = paddle.rand([2]).numpy().tolist()
        return str(
            [digest_of_model(self.model), buffers, moments, self.schedule.state_dict(), self.scaler.state_dict(), drawn]
        )


@pytest.mark.parametrize("last", range(1, 9))
def test_left_after_any_step_it_ends_as_if_it_had_not_been(tmp_path: Path, last: int) -> None:
    whole = Program(tmp_path / "whole").run()
    Program(tmp_path / "left").run(last)
    again = Program(tmp_path / "left")
    assert again.state.step == last // 3 * 3
    assert again.run() == whole
    assert Program(tmp_path / "left").run() == whole, "at its end it ends"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[int]:
    """That a launcher holds for this rank."""
    descriptor = make_kept()
    monkeypatch.setenv(KEPT_VARIABLE, path_of(descriptor))
    monkeypatch.setenv(JOINED_VARIABLE, str(tmp_path / "joined"))
    yield descriptor
    os.close(descriptor)


class Replaceable:
    """A program of one rank whose launcher could replace it."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.alone = RingSynchronizer(self.join(""), connect=self.join)
        self.models = WrappedModels(lambda: self.alone)
        self.model = nn.Linear(6, 2)
        self.optimizer = paddle.optimizer.Adam(0.1, parameters=self.model.parameters())
        self.wrap(self.model)
        self.state = self.make(folder, **more)

    def join(self, _: str) -> Group:
        return Group(RingAlgorithm(connect_threads(1)[0]), backend="threads")

    def wrap(self, model: Any) -> None:
        self.models.wrap(model, first_bytes=64, bucket_bytes=64)

    def make(self, folder: Path, **more: Any) -> TrainingState:
        objects = {"model": self.model, "optimizer": self.optimizer, "checkpoint_dir": folder, **more}
        return TrainingState(**objects, joined=lambda: self.alone, models=self.models)

    def loss(self, batch: Any) -> Any:
        return self.model(paddle.to_tensor(batch)).square().mean()

    def step(self, batch: Any) -> str:
        self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        return digest_of_model(self.model)


@pytest.fixture
def program(tmp_path: Path, memory: int) -> Iterator[Replaceable]:
    made = Replaceable(tmp_path / "commits")
    yield made
    made.models.stop()


@pytest.mark.parametrize("how", ["as it should", "gradients are left", "another model", "another state"])
def test_a_step_is_kept_in_memory_only_if_all_is_known_of_it(
    how: str, program: Replaceable, memory: int, tmp_path: Path
) -> None:
    if how == "another model":
        other = nn.Linear(2, 2)
        program.wrap(other)
    elif how == "another state":
        program.make(tmp_path / "others")
    for _, batch in program.state.steps(BATCHES):
        assert has_kept(memory) == (how == "as it should" and program.state.step > 0)
        program.step(batch)
        if how == "gradients are left":
            program.loss(batch).backward()
    assert not has_kept(memory), "who dies after the last step is not replaced alone"


def test_a_body_that_clears_gradients_at_its_beginning_is_told_once_what_that_costs(
    program: Replaceable, memory: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for _, batch in program.state.steps(BATCHES):
        program.optimizer.clear_grad()
        program.loss(batch).backward()
        program.optimizer.step()
        assert not has_kept(memory)
    assert capsys.readouterr().err.count("if it cleared them at its end, clear_grad(), the others could go on") == 1


@pytest.mark.parametrize("clears", ["after an update", "before a body"])
def test_a_commit_waits_for_the_update_that_accumulated_gradients_are_for(clears: str, tmp_path: Path) -> None:
    """Left after any step, and begun again, it ends as if it had not been."""

    def run(folder: Path, last: int = 8) -> str:
        paddle.seed(1)
        with paddle.utils.unique_name.guard():
            program = Replaceable(folder, commit_every=3)
            for _, batch in program.state.steps(BATCHES, epochs=2):
                first, ends = program.state.step % 2 == 0, program.state.step % 2 == 1
                if first and clears == "before a body":
                    program.optimizer.clear_grad()
                program.loss(batch).backward()
                if ends:
                    program.optimizer.step()
                if ends and clears == "after an update":
                    program.optimizer.clear_grad()
                if program.state.step == last - 1:
                    break
            program.state._writer.finish()
            program.models.stop()
            return str(digest_of_model(program.model))

    whole = run(tmp_path / "whole")
    assert CommitFolder(tmp_path / "whole").steps() == [4, 6]
    for last in range(1, 8):
        run(tmp_path / str(last), last)
        assert run(tmp_path / str(last)) == whole, last


def test_a_commit_that_waits_for_long_is_told_of(
    program: Replaceable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_state, "LONG", 2)
    program.state._every = 1
    for _, batch in program.state.steps(BATCHES):
        program.loss(batch).backward()
    said = capsys.readouterr().err
    assert said.count("the commit of step 1 waits for an update: 2 steps have added to the gradients since") == 1


def test_the_failure_of_a_group_without_a_step_in_memory_is_raised(program: Replaceable) -> None:
    def fails(_: float) -> None:
        raise PeerLost("rank 1 died")

    program.alone.finish = fails  # type: ignore[method-assign]
    _, batch = next(program.state.steps(BATCHES))
    with pytest.raises(PeerLost, match="rank 1 died"):
        program.step(batch)


@pytest.mark.parametrize("when", ["a step before", "in the same step"])
def test_who_has_frozen_a_parameter_does_not_outlive_its_group(when: str, program: Replaceable, memory: int) -> None:
    """Who takes the place of another begins with the model as it was."""

    def fails(_: float) -> None:
        raise PeerLost("rank 1 died")

    def run() -> None:
        for _, batch in program.state.steps(BATCHES):
            if program.state.step == 2:
                program.model.bias.stop_gradient = True
            if program.state.step == 2 + (when == "a step before"):
                assert has_kept(memory) == (when == "in the same step")
                program.alone.finish = fails  # type: ignore[method-assign]
            program.step(batch)

    with pytest.raises(PeerLost, match="rank 1 died"):
        run()


def test_a_body_whose_group_fails_goes_on_alone_and_its_batch_comes_again(
    program: Replaceable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RESTARTS_VARIABLE, "0")
    monkeypatch.setenv(JOB_SECRET_VARIABLE, "")
    monkeypatch.setenv(WORD_VARIABLE, str(tmp_path / "word"))
    Word(1, "unix-abstract:there", "").give(tmp_path / "word")
    finish, seen = program.alone.finish, 0

    def fails(_: float) -> None:
        program.alone.finish = finish  # type: ignore[method-assign]
        raise PeerLost("rank 1 died")

    for _, batch in program.state.steps(BATCHES):
        if seen == 2:
            program.alone.finish = fails  # type: ignore[method-assign]
            before = digest_of_model(program.model)
        elif seen == 3:
            assert (program.state.step, program.models.failed) == (2, False)
            assert digest_of_model(program.model) == before
            assert (batch == BATCHES[2]).all()
        program.step(batch)
        if seen == 2:
            assert program.models.failed
            assert not (tmp_path / "joined").exists()  # what follows in the body may end it
            assert program.step(batch) != before  # whatever it does is undone
        seen += 1
    assert seen == len(BATCHES) + 1
    assert "waits 1 PeerLost: rank 1 died" in (tmp_path / "joined").read_text()
    assert "goes on 1 2 2" in (tmp_path / "joined").read_text()


def test_a_forward_before_a_body_does_not_decide_for_a_backward_in_it(program: Replaceable) -> None:
    """Who takes the place of another has not made it, or once more than the others."""
    [wrapped] = program.models._models
    averages: list[float] = []
    finish = program.alone.finish
    program.alone.finish = lambda limit: averages.append(limit) or finish(limit)  # type: ignore[func-returns-value,method-assign]
    wrapped.note_forward(synchronise=True)
    for _, batch in program.state.steps(BATCHES):
        wrapped.enabled = False
        program.step(batch)
        wrapped.note_forward(synchronise=True)
    assert averages == []


def test_a_commit_is_exported_with_what_paddle_needs(tmp_path: Path) -> None:
    Program(tmp_path / "commits").run(6)
    program = Program(tmp_path / "commits")
    assert main(["export", str(tmp_path / "commits"), str(tmp_path / "mine")]) == 0
    loaded, optimizer = (paddle.load(str(tmp_path / f"mine.{kind}")) for kind in ("pdparams", "pdopt"))
    state = program.model.state_dict()
    assert loaded.keys() == state.keys()
    assert all((loaded[name].numpy() == tensor.numpy()).all() for name, tensor in state.items())
    assert optimizer["LR_Scheduler"]["last_epoch"] == 6
    assert optimizer.keys() == program.optimizer.state_dict().keys()


def test_a_scheduler_that_the_optimizer_does_not_have(tmp_path: Path) -> None:
    apart = [paddle.optimizer.lr.StepDecay(0.1, 2) for _ in range(2)]
    first = Program(tmp_path, scheduler=apart[0])
    apart[0].step()
    first.run(3)
    Program(tmp_path, scheduler=apart[1])
    assert apart[1].last_epoch == apart[0].last_epoch == 1


def test_another_model_or_number_of_ranks_is_refused(tmp_path: Path) -> None:
    Program(tmp_path).run(3)
    with pytest.raises(UsageError, match=r"are of another model: 0\.bias \[5\], here \[7\]"):
        Program(tmp_path, width=7)
    with pytest.raises(UsageError, match=r"step 3 in .* is of 1 rank\(s\), this job has 2; give it 1 again"):
        Program(tmp_path, ranks=2)


def test_another_number_of_ranks_goes_on_where_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two of four batches were trained with by one rank: one of the two that two ranks have."""
    first = Program(tmp_path)
    first.state._every = 2
    first.run(2)
    again = Program(tmp_path, ranks=2, elastic=True)
    again.state._every = 100  # the other rank's parts will not come
    told = f"gradsync: goes on from the commit of step 2 in {tmp_path}, of 1 rank(s), with 2: "
    assert capsys.readouterr().err == told + "from here on its bits are another run's\n"
    assert digest_of_model(again.model) == CommitFolder(tmp_path).verify(2).parameters_sha256
    places = [(epoch, batch.tolist()) for epoch, batch in again.state.steps(BATCHES[:2], epochs=2)]
    assert places == [(0, BATCHES[1].tolist()), (1, BATCHES[0].tolist()), (1, BATCHES[1].tolist())]
    assert again.state.step == 5


def test_a_torn_commit_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = Program(tmp_path).run(6)
    assert CommitFolder(tmp_path).steps() == [3, 6]
    os.truncate(CommitFolder(tmp_path).part_file(6, "rank-0"), 99)
    assert Program(tmp_path).run(6) == whole
    assert "truncated at 99 of" in capsys.readouterr().err
    for step in (3, 6):
        os.truncate(CommitFolder(tmp_path).part_file(step, "rank-0"), 99)
    with pytest.raises(CommitCorrupt):
        Program(tmp_path)


@pytest.mark.parametrize("options", [{"commit_every": 0}, {"keep": 0}])
def test_wrong_numbers_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    objects: dict[str, Any] = {"model": None, "optimizer": None, "checkpoint_dir": tmp_path, **options}
    with pytest.raises(ValueError, match="commit_every and keep must be at least 1"):
        TrainingState(**objects, joined=LocalSynchronizer)


def test_what_cannot_be_kept_is_named() -> None:
    assert plain_or_array({"a": np.float64(1), "b": [paddle.ones([2])]}, "s") == {"a": 1.0, "b": [[1.0, 1.0]]}
    with pytest.raises(UsageError, match="TrainingState cannot keep scheduler's rule, a function; keep numbers"):
        plain_or_array(lambda: None, "scheduler's rule")


def test_both_schemes_have_it() -> None:
    for scheme in (collective, ps):
        assert issubclass(scheme.TrainingState, TrainingState)
        assert "TrainingState" in dir(scheme)


def test_a_state_without_a_folder_is_told_what_to_give_it() -> None:
    with pytest.raises(UsageError) as caught:
        TrainingState(model=None, optimizer=None, joined=LocalSynchronizer)
    assert str(caught.value) == (
        "TrainingState needs a folder for its commits, the same on all ranks: "
        'TrainingState(model=model, optimizer=optimizer, checkpoint_dir="commits")'
    )
