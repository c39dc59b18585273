"""`python -m benchmarks compare script.py`: a user's program, as it is, under each scheme."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import to_builtins

pytest.importorskip("paddle")
from benchmarks.contestants.table_of_trainings import OTHER_ORDER, PADDLE_SCHEMES, Contestant
from benchmarks.flags.script import CompareScriptConfig
from benchmarks.training.program import ProgramFailed, check_program, reason_in, run_once
from benchmarks.training.program_certificate import PADDLE_BOUNDS, YARDSTICK_MULTIPLE, certify_programs, distance
from benchmarks.training.script_worker import leave_one_rank_alone, make_one_group_of_all_ranks
from benchmarks.verbs.script import compare_script, summarise
from common.errors import UsageError
from common.system import mkl
from tests.support import warm
from tests.support.groups import ROOT
from tests.support.typed_results import load, program_record

LIMITS: Any = {"warmup_steps": 3, "timeout": 30.0, "run_timeout": 100.0}
DEFAULT = Contestant("paddle-default", "gloo", 2)
PROGRAM = ROOT / "tests" / "programs" / "many_ways.py"


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [sys.executable, "-m", "benchmarks", "compare", *flags],
        timeout=110,
    )


@pytest.mark.processes
def test_a_failure_is_not_explained_by_another_contestants_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "serverlog.0").write_text("ps.server: PeerLost: the server was told to stop\n")
    monkeypatch.setattr("benchmarks.training.program.launcher", lambda *_: ["-c", "raise ValueError('no such data')"])
    with pytest.raises(ProgramFailed, match=r"^exit code 1: ValueError: no such data$"):
        run_once(Contestant("paddle", "gloo", 2), ["train.py"], tmp_path, **LIMITS)


@pytest.mark.processes
def test_a_program_is_measured_under_each_scheme(tmp_path: Path) -> None:
    folders = ["--out", str(tmp_path), "--history", str(tmp_path / "history")]
    done = run("--repetitions", "1", *folders, "--lang", "zh", str(PROGRAM))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "script.md").read_text().startswith("# GradSync：您的程序在各方案下的表现")
    found = json.loads((tmp_path / "script.json").read_text())
    assert found["certificate"]["identical"]
    assert found["certificate"]["against_paddle"] == {"paddle N=2": {"1": 0.0, "5": 0.0, "20": 0.0}}
    assert found["certificate"]["yardsticks"] == {}  # not measured where it is not needed
    assert [r["contestant"] for r in found["runs"]] == ["ps/shm N=2", "ring/shm N=2", "paddle N=2"]
    assert all(r["step_ms"] > 0 and r["steps"] == 9 for r in found["runs"])
    assert done.stdout.rstrip().endswith(str(tmp_path / "script.html"))
    (kept,) = (tmp_path / "history").iterdir()
    assert "-script-" in kept.name
    assert load(kept) == found
    other = run_once(Contestant(OTHER_ORDER, "shm", 2), [str(PROGRAM)], tmp_path, **LIMITS)
    assert other.parameters_sha256 == found["certificate"]["schemes"]["ring/shm N=2"]


def test_the_reason_is_the_first_error_that_blames_nobody_else(tmp_path: Path) -> None:
    logs = {
        "workerlog.2": "setting up\nAssertionError\nbye",
        "workerlog.1": "RuntimeError: connection closed",
        "workerlog.0": "program.py: PeerLost: rank 2 died",
        "launcher.log": "collective.run: ProcessFailed: rank 2 ended with exit code 1",
    }
    for age, (name, text) in enumerate(logs.items()):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (age, age))
    assert reason_in(tmp_path) == ": AssertionError"
    (tmp_path / "workerlog.2").write_text("")
    (tmp_path / "workerlog.1").write_text("")
    assert reason_in(tmp_path) == ": collective.run: ProcessFailed: rank 2 ended with exit code 1"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Traceback (most recent call last):\n  File x\n    f()\nmine.NoData: empty\nbye", ": mine.NoData: empty"),
        ("SystemExit: no data\nbye", ": no data"),
        ("usage: a.py\na.py: error: no such flag", ": a.py: error: no such flag"),
        ("rank 0 of 2 sha c4646842d8008d78", ", without naming an error; its last lines are in script.json"),
        ("", ", without a word"),
    ],
)
def test_what_a_program_prints_last_is_no_reason(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "workerlog.0").write_text(text)
    assert reason_in(tmp_path) == reason


def test_unknown_scheme_is_one_line() -> None:
    done = run("--schemes", "ps,padle", str(PROGRAM))
    assert done.returncode == 2
    assert "unknown scheme 'padle'; did you mean 'paddle'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param(None, "no such script: {path}", id="missing"),
        pytest.param(
            "import paddle\nmodel = [1, 2\nlosses = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14\n",
            r"{path}, line 2: '\[' was never closed: model = \[1, 2",
            id="bracket",
        ),
        pytest.param(
            f"if True:\n    loss = {'1 + ' * 60}1 +\n",
            rf"{{path}}, line 2: invalid syntax: loss = {re.escape('1 + ' * 60)}1 \+",
            id="a long line",
        ),
    ],
)
def test_a_program_that_cannot_run_is_refused_before_anything_starts(
    source: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.verbs.script.run", lambda *_: pytest.fail("something was started"))
    program = tmp_path / "program.py"
    if source is not None:
        program.write_text(source)
    with pytest.raises(UsageError, match=f"^{words.format(path=re.escape(str(program)))}$"):
        compare_script(CompareScriptConfig(out=tmp_path), [str(program)])


def test_a_program_that_warns_is_no_reason_to_refuse_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("assert (1, 'always true')\n")
    check_program(program)


def test_step_times_are_differences_after_warm_up() -> None:
    times = [0.0, 5.0, 5.1, 5.3, 5.4], [0.0, 9, 9.2, 9.4, 9.6]
    found = summarise(
        Contestant("ps", "grpc", 2, 1), [program_record(times=each, memory_bytes=3_000_000) for each in times], 1
    )
    assert found.step_ms == pytest.approx(150)
    assert found.memory_mb == 3
    assert found.step_ms_interval == pytest.approx((100, 200))


def keep(folder: Path, contestant: Contestant, distances: tuple[float, ...]) -> None:
    """Parameters so far from [1.0] after 1, 5 and 20 backwards."""
    for steps, away in zip(PADDLE_BOUNDS, distances, strict=True):
        np.savez(folder / f"{contestant.stem}.{steps}.npz", w=np.array([1 / (1 + away)]))


@pytest.fixture
def no_cpu_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(mkl.CPU_TYPE, raising=False)
    monkeypatch.setenv(mkl.OTHER_CHOICES[0], "AUTO")  # so that ours is none on any processor


def certified(
    folder: Path, apart: tuple[float, ...], yardstick: tuple[float, ...], nranks: int = 4
) -> tuple[dict[str, Any], int]:
    """The certificate where paddle is so far away after 1, 5 and 20 backwards, and how often a yardstick was asked."""
    ours = [Contestant("ps", "shm", nranks, 1), Contestant("ring", "shm", nranks)]
    theirs = [Contestant(scheme, "gloo", nranks) for scheme in PADDLE_SCHEMES]
    for contestant in ours:
        keep(folder, contestant, (0, 0, 0))
    for contestant in theirs:
        keep(folder, contestant, apart)
    asked = []

    @cache  # as compare_script has it
    def once_more(contestant: Contestant) -> bool:
        asked.append(contestant)
        keep(folder, contestant, yardstick or (0, 0, 0))
        return bool(yardstick)

    runs = {c: [program_record(parameters_sha256="a" if c in ours else "b")] for c in (*ours, *theirs)}
    return to_builtins(certify_programs(list(runs), runs, {}, folder, once_more)), len(asked)


@pytest.mark.usefixtures("no_cpu_type")
@pytest.mark.parametrize(
    ("apart", "yardstick", "passed", "asked"),
    [
        ((1e-8, 4e-8, 3e-4), (), True, 0),  # within the fixed bounds
        ((5e-8, 1.8e-3, 6.9e-3), (4e-8, 2.1e-3, 7e-3), True, 1),  # rounding does as much to our own sums
        ((5e-8, 1.8e-3, 0.3), (4e-8, 2.1e-3, 7e-3), False, 1),  # but not so much
        ((1e-3, 1.8e-3, 6.9e-3), (4e-8, 2.1e-3, 7e-3), False, 1),  # a wrong mean shows in the first step
        ((5e-8, 1.8e-3, 6.9e-3), (0, 0, 0), False, 1),  # then the fixed bounds are left
        ((5e-8, 1.8e-3, 6.9e-3), (), False, 1),  # the run for it failed
    ],
)
def test_paddle_may_be_as_far_away_as_rounding_takes_a_training(
    apart: tuple[float, ...], yardstick: tuple[float, ...], passed: bool, asked: int, tmp_path: Path
) -> None:
    found, times = certified(tmp_path, apart, yardstick)
    assert (found["passed"], times) == (passed, asked)
    assert found["identical"]
    assert found["against_paddle"]["paddle N=4"] == pytest.approx(
        dict(zip(PADDLE_BOUNDS, apart, strict=True)), rel=1e-3
    )
    assert list(found["yardsticks"]) == (["paddle N=4", "paddle-default N=4"] if yardstick else [])
    if yardstick:
        told = found["yardsticks"]["paddle N=4"]
        assert [told[n]["distance"] for n in PADDLE_BOUNDS] == pytest.approx(yardstick, rel=1e-2)
        assert [told[n]["bound"] for n in PADDLE_BOUNDS] == pytest.approx(
            [max(bound, YARDSTICK_MULTIPLE * d) for bound, d in zip(PADDLE_BOUNDS.values(), yardstick, strict=True)],
            rel=1e-2,
        )


@pytest.mark.usefixtures("no_cpu_type")
def test_two_ranks_need_no_yardstick(tmp_path: Path) -> None:
    found, asked = certified(tmp_path, (1e-5, 1e-5, 1e-5), (1.0, 1.0, 1.0), nranks=2)
    assert not found["passed"]
    assert asked == 0


def certified_default(folder: Path, once_more: Callable[[Contestant], bool], away: float) -> dict[str, Any]:
    """The certificate where paddle has our parameters, and paddle-default is so far away."""
    ours, paddle, default = Contestant("ps", "shm", 2, 1), Contestant("paddle", "gloo", 2), DEFAULT
    for contestant, apart in ((ours, 0), (paddle, 0), (default, away)):
        keep(folder, contestant, (apart,) * 3)
    runs = {c: [program_record(parameters_sha256=c.scheme)] for c in (ours, paddle, default)}
    found: dict[str, Any] = to_builtins(certify_programs(list(runs), runs, {}, folder, once_more))
    return found


@pytest.fixture
def misjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """An AMD processor, and nobody has set anything."""
    monkeypatch.setattr(mkl, "_is_misjudged", lambda _: True)
    for name in (mkl.CPU_TYPE, *mkl.OTHER_CHOICES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("misjudged")
def test_paddles_default_is_held_against_ours_with_the_same_kernels(tmp_path: Path) -> None:
    def once_more(contestant: Contestant) -> bool:
        assert contestant == Contestant("ps", "shm", 2, 1, mkl_chooses=True)
        keep(tmp_path, contestant, (0.5, 0.5, 0.5))
        return True

    found = certified_default(tmp_path, once_more, 0.5)
    assert found["passed"]
    assert found["own_kernels"] == [DEFAULT.name]
    assert found["against_paddle"] == {name: {1: 0, 5: 0, 20: 0} for name in ("paddle N=2", DEFAULT.name)}


@pytest.mark.usefixtures("misjudged")
@pytest.mark.parametrize("chosen", ["5", "0", "auto", ""])
def test_where_the_user_has_set_the_kernels_all_have_the_same(
    chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(mkl.CPU_TYPE, chosen)
    found = certified_default(tmp_path, lambda _: pytest.fail("not needed"), 0.0)
    assert found["passed"]
    assert found["own_kernels"] == []


@pytest.mark.usefixtures("misjudged")
def test_without_that_run_paddles_default_is_not_judged(tmp_path: Path) -> None:
    found = certified_default(tmp_path, lambda _: False, 0.5)
    assert found["passed"]
    assert list(found["against_paddle"]) == ["paddle N=2"]


@pytest.mark.processes
@pytest.mark.long
def test_ours_with_mkls_choice_end_in_the_bits_of_paddles_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(mkl.CPU_TYPE, raising=False)  # the tests' own process has set it
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.read_text().replace("nn.Linear(8, 16)", "nn.Linear(8, 64), nn.Linear(64, 16)"))
    done = run("--schemes", "ring,paddle-default", "--repetitions", "1", "--out", str(tmp_path), str(program))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "script.json").read_text())
    assert results["failed"] == {}
    found = results["certificate"]
    assert found["against_paddle"] == {DEFAULT.name: {"1": 0, "5": 0, "20": 0}}
    assert found["own_kernels"] == ([DEFAULT.name] if mkl.wanted_cpu_type() else [])
    assert ("once more, as ring/shm N=2 MKL=auto: paddle-default has" in done.stdout) == bool(found["own_kernels"])
    same = found["schemes"][DEFAULT.name] == found["schemes"]["ring/shm N=2"]
    assert same == (not found["own_kernels"]), "other kernels, other bits"


def test_distance_is_relative() -> None:
    assert distance({"w": np.array([3.0, 4.5])}, {"w": np.array([3.0, 4.0])}) == pytest.approx(0.1)


ENDS_IN_C = """
import atexit, ctypes
from benchmarks.training.script_worker import leave_before_paddles_end

say_that_it_ended_well = leave_before_paddles_end()
atexit.register(print, "the program's own end")
libc = ctypes.CDLL(None)
libc.on_exit(libc.abort, None)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("more", "code"), [("say_that_it_ended_well()", 0), ("", -signal.SIGABRT)])
def test_what_crashes_after_a_program_under_paddle_is_not_its_failure(more: str, code: int) -> None:
    command = [sys.executable, "-c", ENDS_IN_C + more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, "the program's own end\n"), done.stderr


def test_fleet_leaves_one_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from paddle.distributed import fleet

    monkeypatch.setattr(fleet, "distributed_model", None)
    leave_one_rank_alone()
    model = object()
    assert fleet.distributed_model(model) is model


def test_paddles_fleet_has_one_group_of_all_ranks_and_others_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from paddle.base import core

    gloo = SimpleNamespace(create=lambda store, rank, size, number=0: [store, rank, size, number])
    monkeypatch.setattr(core, "ProcessGroupGloo", gloo)
    make_one_group_of_all_ranks(4)
    whole = gloo.create("store", 1, 4)
    assert whole == ["store", 1, 4, 0]
    assert gloo.create("store", 1, 4, 14) is whole
    assert gloo.create("store", 1, 2, 15) == ["store", 1, 2, 15]
