"""`compare script.py` where the program fails: who failed, why and what to do, each said once."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("paddle")
from benchmarks.contestants.table_of_trainings import Contestant
from benchmarks.records.environment import head
from benchmarks.records.script import Certificate, Failure, ScriptResults
from benchmarks.reports.script import verdict
from benchmarks.training.program import ProgramFailed, tails
from benchmarks.verbs.script import blamed, judge, show
from common.errors import GradSyncError
from tests.system.test_compare_script import PROGRAM, run


@pytest.mark.processes
def test_a_program_that_fails_is_reported_with_its_words(tmp_path: Path) -> None:
    program = tmp_path / "bad.py"
    program.write_text("raise ValueError('no such luck')\n")
    done = run("--schemes", "ring", "--repetitions", "1", "--out", str(tmp_path), str(program))
    assert done.returncode == 1
    line = "ring/shm N=2 failed: exit code 1: ValueError: no such luck"
    assert f"benchmarks compare: GradSyncError: {line}" in done.stderr
    assert line not in done.stdout  # a terminal shows both
    assert line in (tmp_path / "script.md").read_text()


def test_a_reason_of_several_contestants_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    schemes = [("ps", 0), ("ring", 0), ("paddle", 0), ("ring", 4)]
    reasons = ["out of luck"] * 3 + ["out of time"]
    failures: Any = {
        Contestant(scheme, "shm", nranks or 2): ProgramFailed(why, ["workerlog.0: bye"])
        for (scheme, nranks), why in zip(schemes, reasons, strict=True)
    }
    certificate = Certificate(identical=True, ours=[], against_paddle={}, bounds={}, passed=True, schemes={})
    failed = {c.name: Failure(str(exc), []) for c, exc in failures.items()}
    results = ScriptResults(**head(), program="p.py", certificate=certificate, failed=failed, runs=[])
    names = blamed(certificate, failures)
    show(results, Console(width=200), told_later=names)
    assert capsys.readouterr().out.splitlines()[1:] == ["ring/shm N=4 failed: out of time."]
    words = r"^ps/shm N=2, ring/shm N=2, paddle N=2 failed: out of luck\n  workerlog.0: bye$"
    with pytest.raises(GradSyncError, match=words):
        judge(certificate, failures)
    assert verdict(results)[1] == "ps/shm N=2, ring/shm N=2, paddle N=2 failed: out of luck."


def test_processes_that_end_alike_are_told_once_and_a_launcher_repeats_nothing(tmp_path: Path) -> None:
    same = "Traceback (most recent call last):\n  line 4, in f\nValueError: why\n"
    for name, text in {
        "workerlog.0": same,
        "workerlog.1": "only mine\n",
        "workerlog.2": same,
        "launcher.log": "ps.run: ProcessFailed: rank 0 ended with exit code 1\n  | ValueError: why\n",
    }.items():
        (tmp_path / name).write_text(text)
    for moment, name in enumerate(("workerlog.0", "workerlog.2", "workerlog.1")):
        os.utime(tmp_path / name, (moment, moment))
    assert tails(tmp_path) == [
        "workerlog.0, workerlog.2: Traceback (most recent call last):",
        "workerlog.0, workerlog.2: line 4, in f",
        "workerlog.0, workerlog.2: ValueError: why",
        "workerlog.1: only mine",
        "launcher.log: ps.run: ProcessFailed: rank 0 ended with exit code 1",
    ]


@pytest.mark.processes
@pytest.mark.parametrize("scheme", ["ps", pytest.param("ring", marks=pytest.mark.long)])
def test_a_program_without_a_model_is_told_what_to_do(scheme: str, tmp_path: Path) -> None:
    program = tmp_path / "no_model.py"
    program.write_text("print('nothing to train')\n")
    done = run("--schemes", scheme, "--repetitions", "1", "--out", str(tmp_path), str(program))
    assert done.returncode == 1
    assert (
        f"{scheme}/shm N=2 failed: the program ended well, but gave no model to paddle.DataParallel or" in done.stderr
    )
    assert len(done.stderr.splitlines()) == 1  # nothing of what the launcher makes of it


UNDER_ONE = """
import os, runpy, sys
if {under} and os.environ["PADDLE_TRAINER_ID"] == "1":
    assert False, "rank 1 minds"
runpy.run_path({program!r}, run_name="__main__")
sys.exit(0)
"""


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize(
    ("schemes", "under", "failing", "measured", "code"),
    [
        pytest.param(
            "ring,paddle",
            "not {'ps', 'collective'} & sys.modules.keys()",
            "paddle N=2",
            "ring/shm N=2",
            0,
            marks=pytest.mark.longest,
        ),
        (
            "ring,ps",
            "'GRADSYNC_BACKEND' in os.environ",
            "ring/shm N=2",
            "ps/shm N=2",
            1,
        ),  # Paddle's launcher fails by itself at times
    ],
)
def test_a_contestant_that_fails_is_named_and_the_others_are_measured(
    schemes: str, under: str, failing: str, measured: str, code: int, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(UNDER_ONE.format(under=under, program=str(PROGRAM)))
    done = run("--schemes", schemes, "--repetitions", "1", "--out", str(tmp_path), str(program))
    assert done.returncode == code, done.stderr
    told = done.stderr if code else done.stdout
    assert f"{failing} failed: exit code 1: AssertionError: rank 1 minds" in told
    assert re.search(f"^{failing} +failed *$", done.stdout, re.MULTILINE)
    found = json.loads((tmp_path / "script.json").read_text())
    assert list(found["failed"]) == [failing]
    assert any("rank 1 minds" in line for line in found["failed"][failing]["output"])
    assert [r["contestant"] for r in found["runs"]] == [measured]
