"""How far a long run is: a line now and then where there is no terminal, a bar where there is one."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks.records import progress as module
from benchmarks.records.overall_progress import OverallProgress
from benchmarks.records.progress import progress, told_by


def test_without_a_terminal_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 31.0, 40.0, 62.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with progress(Console(file=io.StringIO()), 9) as on_run:
        for number in range(4):
            on_run(f"run {number}")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "1 of 9 done after 31 s, about 248 s left; now run 1",
        "3 of 9 done after 62 s, about 124 s left; now run 3",
    ]


def test_a_larger_job_reads_it_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.PROGRESS_VARIABLE, str(tmp_path / "told"))
    console = Console(file=io.StringIO(), force_terminal=True, width=150)
    with (
        progress(Console(file=io.StringIO()), 4) as on_run,
        OverallProgress(console, [("first", 2, 0.0), ("second", 6, 0.0)]) as whole,
    ):
        whole.show(0, 1.0, "")
        for what in ("a", "b: c", "d"):
            on_run(what)
        assert (tmp_path / "told").read_text() == "2 4 d"
        whole.show(1, *told_by(tmp_path / "told"))
        assert whole.words == "1 of 2 parts done, about 1 min left; now second: d"
        (tmp_path / "told").write_text("3 ")
        assert told_by(tmp_path / "told") == (0.0, "")


def test_what_an_earlier_job_has_done_tells_nothing_of_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 300.0])
    monkeypatch.setattr("benchmarks.records.overall_progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    console = Console(file=io.StringIO(), force_terminal=True, width=150)
    with OverallProgress(console, [("first", 10, 0.5), ("second", 10, 0.5)]) as whole:
        whole.show(0, 1.0, "x")  # 5 expected minutes in 5
    assert whole.words == "1 of 2 parts done, about 5 min left; now first: x"


def test_on_a_terminal_a_bar_that_goes_away(capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    with progress(Console(file=screen, force_terminal=True, width=80), 2) as on_run:
        on_run("first")
        on_run("second")
    assert "second" in screen.getvalue()
    assert "1/2" in screen.getvalue()
    assert capsys.readouterr().err == ""
