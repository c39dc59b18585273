"""`python -m common.commit`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

paddle = pytest.importorskip("paddle")

from common.commit.__main__ import main  # noqa: E402
from common.commit.folder import CommitFolder  # noqa: E402
from common.trainer.models import make_model  # noqa: E402
from tests.support.commits import folder_of  # noqa: E402
from tests.support.small_training import SMALL, run  # noqa: E402


def test_they_are_listed_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, 20, 40)
    assert main(["list", str(tmp_path)]) == main(["verify", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 20: epoch 0, ps, 2 rank(s), 1 server(s), ")
    assert lines[2:] == ["step 20: whole, 3 parts", "step 40: whole, 3 parts"]
    os.truncate(folder.part_file(20, "server-0"), 9)
    assert main(["verify", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith(f"step 20: not whole: {folder.part_file(20, 'server-0')}: truncated at 9 of ")
    assert out.splitlines()[1] == "step 40: whole, 3 parts"
    assert err == f"common.commit: CommitCorrupt: 1 of 2 commits in {tmp_path} are not whole\n"


def test_a_commit_is_exported_for_paddle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = run(replace(SMALL, checkpoint_dir=tmp_path / "commits", commit_every=5)).model
    assert main(["export", str(tmp_path / "commits"), str(tmp_path / "new" / "mine")]) == 0
    assert capsys.readouterr().out == f"step 5: {tmp_path}/new/mine.pdparams\nstep 5: {tmp_path}/new/mine.pdopt\n"
    loaded = paddle.load(str(tmp_path / "new" / "mine.pdparams"))
    for name, tensor in trained.state_dict().items():
        assert (loaded[name].numpy() == tensor.numpy()).all()
    (tmp_path / "file").write_text("")
    assert main(["export", str(tmp_path / "commits"), str(tmp_path / "file" / "mine")]) == 1
    text = f"common.commit: FileNotWritten: cannot make the folder {tmp_path}/file for what is exported: File exists"
    assert capsys.readouterr().err == f"{text}\n"
    model = make_model(SMALL.model, seed=1)
    optimizer = paddle.optimizer.Adam(parameters=model.parameters())
    optimizer.set_state_dict(paddle.load(str(tmp_path / "new" / "mine.pdopt")))
    model(paddle.ones([1, 1, 28, 28])).sum().backward()
    optimizer.step()  # takes all of it
    power = next(value for key, value in optimizer.state_dict().items() if "beta1_pow" in key)
    assert power.numpy().item() == pytest.approx(0.9 ** (5 + 2))


def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = CommitFolder(tmp_path)
    assert main(["list", str(folder)]) == 0
    assert capsys.readouterr().out == f"there is no commit in {tmp_path}\n"
    assert main(["export", str(folder), "x"]) == main(["export", str(folder), "x", "--step", "3"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"common.commit: UsageError: there is no commit in {tmp_path}"
    assert second == f"common.commit: UsageError: there is no commit of step 3 in {tmp_path} (there: none)"
    with pytest.raises(SystemExit):
        main(["list", str(tmp_path / "no")])
    assert f"there is no folder {tmp_path / 'no'}" in capsys.readouterr().err
