"""The built-in training goes on from its commits, by one rank in this process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

paddle = pytest.importorskip("paddle")

from common.commit.folder import CommitFolder  # noqa: E402
from common.errors import CommitCorrupt, CommitFailed, UsageError  # noqa: E402
from common.launch.flags import TrainingConfig  # noqa: E402
from common.system.process import RESTARTS_VARIABLE  # noqa: E402
from common.tensors.optimizers import OPTIMIZERS  # noqa: E402
from tests.support.small_training import SMALL, run  # noqa: E402


def kept(folder: Path, **flags: object) -> TrainingConfig:
    return replace(SMALL, checkpoint_dir=folder, commit_every=2, **flags)  # type: ignore[arg-type]


def digest(config: TrainingConfig) -> str:
    return run(config).record.parameters_sha256


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_bits_are_those_of_the_run_that_nobody_disturbed(tmp_path: Path, optimizer: str) -> None:
    config = kept(tmp_path, optimizer=optimizer)
    whole = digest(replace(SMALL, optimizer=optimizer, steps=7))
    digest(replace(config, steps=5))  # beyond the end of the first epoch, and of the last commit
    gone_on = run(replace(config, steps=7, resume=True))
    assert gone_on.record.parameters_sha256 == whole
    assert gone_on.record.steps == 3


def test_the_manifest_says_what_it_is_of(tmp_path: Path) -> None:
    run(kept(tmp_path, steps=4))
    folder = CommitFolder(tmp_path)
    assert folder.steps() == [2, 4]
    manifest = folder.verify(4)
    assert (manifest.scheme, manifest.nranks, manifest.step, manifest.epoch) == ("local", 1, 4, 1)
    assert manifest.parameters_sha256 == digest(replace(SMALL, steps=4))


def test_a_training_that_was_at_its_end_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = kept(tmp_path, steps=4)
    whole = digest(config)
    again = run(replace(config, resume=True)).record
    assert (again.parameters_sha256, again.steps, again.samples_per_s) == (whole, 0, 0.0)
    told = "gradsync: nothing is left to train: 4 steps are made, 4 were asked for\n"
    assert capsys.readouterr().err.endswith(told)


def test_only_the_last_ones_stay(tmp_path: Path) -> None:
    run(kept(tmp_path, steps=8, keep=2))
    assert CommitFolder(tmp_path).begun() == [6, 8]


def test_commits_are_not_overwritten(tmp_path: Path) -> None:
    run(kept(tmp_path))
    with pytest.raises(UsageError, match=r"has commits up to step 4; go on from there with --resume, or name another"):
        run(kept(tmp_path))


def test_without_a_commit_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no commit in .* to go on from; begin without --resume"):
        run(kept(tmp_path, resume=True))


def test_a_launcher_that_starts_a_job_again_need_not_say_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RESTARTS_VARIABLE, "1")
    whole = digest(kept(tmp_path, steps=5))  # none is there: from the beginning
    assert run(kept(tmp_path, steps=5)).record.steps == 1
    assert f"gradsync: goes on from the commit of step 4 in {tmp_path}\n" in capsys.readouterr().err
    assert digest(kept(tmp_path, steps=5)) == whole


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"optimizer": "sgd"}, "are of --optimizer adam, this job has --optimizer sgd"),
        ({"batch_size": 240}, "are of --batch-size 480, this job has --batch-size 240"),
        ({"model": "mlp:17"}, "are of --model mlp:16, this job has --model mlp:17"),
        ({"seed": 2}, "are of --seed 1, this job has --seed 2"),
    ],
)
def test_another_training_is_refused(tmp_path: Path, flags: dict[str, object], words: str) -> None:
    run(kept(tmp_path))
    with pytest.raises(UsageError, match=words):
        run(kept(tmp_path, resume=True, **flags))


def test_the_commits_of_a_program_are_told_as_such(tmp_path: Path) -> None:
    run(kept(tmp_path))
    folder = CommitFolder(tmp_path)
    folder.write_manifest(msgspec.structs.replace(folder.manifest(4), layout=[], job={}))
    with pytest.raises(UsageError, match="are of a program with a TrainingState, not of the built-in training; start"):
        run(kept(tmp_path, resume=True))


def test_a_torn_commit_is_told_and_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = kept(tmp_path, steps=5)
    whole = digest(config)
    os.truncate(CommitFolder(tmp_path).part_file(4, "rank-0"), 512)
    assert run(replace(config, resume=True)).record.parameters_sha256 == whole
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert "the commit of step 4 is not whole: " in first
    assert "rank-0.safetensors: truncated at 512 of " in first
    assert second == f"gradsync: goes on from the commit of step 2 in {tmp_path}"
    CommitFolder(tmp_path).verify(4)
    for step in (2, 4):
        os.truncate(CommitFolder(tmp_path).part_file(step, "rank-0"), 512)
    with pytest.raises(CommitCorrupt, match=r"none of the 2 commit\(s\)"):
        run(replace(config, resume=True))


def test_what_cannot_be_written_ends_the_training(tmp_path: Path) -> None:
    (tmp_path / "step-00000002").write_text("in the way")
    with pytest.raises(CommitFailed, match="rank-0 cannot write its part of the commit of step 2: "):
        run(kept(tmp_path))


def test_elastic_is_for_going_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--elastic needs --resume: it says how to go on from a commit"):
        kept(tmp_path, elastic=True)


@pytest.mark.parametrize("flags", [{"commit_every": 3}, {"keep": 1}, {"resume": True}])
def test_flags_of_commits_need_a_folder(flags: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"--{next(iter(flags)).replace('_', '-')} needs --checkpoint-dir"):
        replace(SMALL, **flags)  # type: ignore[arg-type]
