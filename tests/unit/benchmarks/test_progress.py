"""How far a long run is: a line now and then where there is no terminal, a bar where there is one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.records import progress as module
from benchmarks.records.progress import progress, told_by


def test_without_a_terminal_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 1.0, 31.0, 40.0, 62.0])
    with progress(Console(file=io.StringIO()), 9, clock.__next__) as on_run:
        for number in range(4):
            on_run(f"run {number}")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "1 of 9 done after 31 s, about 248 s left; now run 1",
        "3 of 9 done after 62 s, about 124 s left; now run 3",
    ]


def test_whoever_started_it_reads_it_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.PROGRESS_VARIABLE, str(tmp_path / "told"))
    assert told_by(tmp_path / "told") == ""
    with progress(Console(file=io.StringIO()), 4) as on_run:
        for what in ("a", "b: c", "d e"):
            on_run(what)
    assert (tmp_path / "told").read_text() == "2 4 d e"
    assert told_by(tmp_path / "told") == "d e"
    (tmp_path / "told").write_text("3 ")
    assert told_by(tmp_path / "told") == ""


def test_on_a_terminal_a_bar_that_goes_away(capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    with progress(Console(file=screen, force_terminal=True, width=80), 2) as on_run:
        on_run("first")
        on_run("second")
    assert "second" in screen.getvalue()
    assert "1/2" in screen.getvalue()
    assert capsys.readouterr().err == ""
