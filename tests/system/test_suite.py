"""`compare --config`: parts of a job run, fail, are kept and shown, each without harm to the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measuring.rounds import ROUNDS_FILE
from benchmarks.suites.job_file import Part
from benchmarks.suites.part import Outcome, fingerprint, keep, take_up
from benchmarks.verbs.suite import next_of
from common.system.mkl import CPU_TYPE
from tests.support import warm
from tests.support.groups import ROOT
from tests.support.typed_results import completed

pytestmark = pytest.mark.processes

SWEEP = """
[[part]]
name = "{name}"
verb = "sweep"
flags = {{ backends = ["shm", "memory-limit"], nranks = {nranks}, sizes = "{sizes}", repetitions = 1, seconds = 0.001 }}
{more}
"""
BROKEN = """
import sys
if "benchmarks.operations.worker" in sys.orig_argv and "3" in sys.orig_argv:
    from benchmarks.contestants.gradsync import Rank
    whole = Rank.all_reduce
    def broken(self):
        whole(self)
        self.array[-1] += 1
    Rank.all_reduce = broken
"""


ROOMY = """
import sys
if sys.orig_argv[2:4] == ["benchmarks", "compare"]:
    from benchmarks.verbs import suite
    suite.ROOM = 0.0
"""
DIES = """
import sys
if sys.orig_argv[2:4] == ["benchmarks", "sweep"] and "first" in sys.orig_argv[-1]:
    import os, pathlib
    from benchmarks.measuring import rounds
    def die(job):
        job.sendall(rounds.TURN)
        pathlib.Path({killed!r}).touch()
        os.kill(os.getpid(), 9)
    rounds.wait_for_turn = die
"""


def part(name: str, *, nranks: int = 2, sizes: str = "4KiB", more: str = "") -> str:
    return SWEEP.format(name=name, nranks=nranks, sizes=sizes, more=more)


def start(folder: Path, *flags: str, **environment: str) -> subprocess.Popen[str]:
    return warm.Popen(
        [
            *(sys.executable, "-m", "benchmarks", "compare", "--config", str(folder / "job.toml")),
            *("--out", str(folder / "out"), *flags),
        ],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *flags: str, **environment: str) -> tuple[int, str, str]:
    with start(folder, *flags, **environment) as process:
        out, err = process.communicate(timeout=110)
    return process.returncode, out, err


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "suite.json").read_text())
    return found


def statuses(folder: Path) -> dict[str, str]:
    return {each["name"]: each["status"] for each in results(folder)["parts"]}


@pytest.mark.long
def test_parts_fail_apart_and_resume_makes_up_for_them_alone(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    broken = part("broken", nranks=3)
    (tmp_path / "job.toml").write_text(part("late", more="limit = 0.001") + broken + part("good"))
    code, out, err = run(tmp_path, PYTHONPATH=str(tmp_path))
    assert code == 3
    assert err.endswith(f"CertificateFailed: broken computed the wrong thing; see {tmp_path}/out/suite.md\n")
    assert out.startswith("3 parts, about 3 minutes\n")
    assert statuses(tmp_path) == {"late": "failed", "broken": "wrong", "good": "done"}
    assert results(tmp_path)["parts"][1]["results"] is None
    page, summary = ((tmp_path / "out" / name).read_text() for name in ("suite.html", "suite.md"))
    for text in (out, page, summary):
        assert "late failed: it took longer than 0.001 minutes (limit)." in text.replace("\n", " ")
        assert "CertificateFailed: wrong sums from shm N=3; no speed is reported" in text.replace("\n", " ")
    assert 'id="part-good-sweep-all_reduce-2"' in page
    log = (tmp_path / "out" / "parts" / "broken" / "log.txt").read_text()
    assert "The sums are WRONG from shm N=3; no speed is shown." in log
    assert "time ms" not in log
    assert "sweep-all_reduce-3" not in page
    first = results(tmp_path)["parts"][2]["results"]["created"]

    (tmp_path / "job.toml").write_text(part("late") + broken + part("good"))
    code, out, err = run(tmp_path, "--resume", "--lang", "zh")
    assert code == 0, err
    again = ("parts/late/sweep.html", "parts/broken/sweep.html", "suite.html")  # a part that is kept is as it was
    assert all('lang="zh-CN"' in (tmp_path / "out" / page).read_text() for page in again)
    assert statuses(tmp_path) == dict.fromkeys(("late", "broken", "good"), "done")
    assert [line.partition(":")[0] for line in out.splitlines() if ": done in" in line] == ["late", "broken"]
    assert results(tmp_path)["parts"][2]["results"]["created"] == first

    whole = (tmp_path / "out" / "suite.json").read_bytes()
    (tmp_path / "job.toml").write_text(part("good", sizes="8KiB"))
    code, _, err = run(tmp_path, "--resume")
    assert code == 2
    assert err.startswith(f"benchmarks compare: UsageError: --out {tmp_path}/out holds good of another command, other ")
    assert (tmp_path / "out" / "suite.json").read_bytes() == whole


def test_other_matrix_kernels_make_another_result(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part("a", "a", ("sweep",))
    found = set()
    for cpu_type in ("0", "5", "5"):
        monkeypatch.setenv(CPU_TYPE, cpu_type)
        found.add(fingerprint(part))
    assert len(found) == 2


def test_what_is_taken_up(tmp_path: Path) -> None:
    """Only what is complete, ended well, and was made by the same command, sources and machine."""
    one, other = (Part("a", "a", ("sweep", "--nranks", count)) for count in "23")
    assert fingerprint(one) == fingerprint(Part("a", "another title", one.words)) != fingerprint(other)
    text = json.dumps(completed({}, "sweep"))
    for status, kept, content, taken in [
        ("done", fingerprint(one), text, True),
        ("done", fingerprint(one), text[:-5], False),
        ("done", fingerprint(other), text, False),
        ("failed", fingerprint(one), text, False),
        ("wrong", fingerprint(one), text, False),
    ]:
        keep(Outcome(one, "", status, seconds=2.0), tmp_path, kept)
        (tmp_path / "sweep.json").write_text(content)
        outcome = Outcome(one, "")
        made_so = take_up(outcome, tmp_path, fingerprint(one))
        assert (outcome.status, outcome.seconds) == (("done", 2.0) if taken else ("missing", 0.0))
        assert made_so == (kept == fingerprint(one))
    assert take_up(outcome, tmp_path / "nothing", fingerprint(one))
    assert outcome.status == "missing"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_an_interrupted_job_reports_what_it_has(
    number: signal.Signals, code: int, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    (tmp_path / "job.toml").write_text(part("first", sizes="40MB") + part("second"))
    with start(tmp_path) as process:
        wait_until(lambda: (tmp_path / "out" / "parts" / "first" / "progress").exists(), 60)
        wait_until(lambda: len(descendants(process.pid)) >= 3)
        children = descendants(process.pid)
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == code
    wait_until(lambda: not any(Path("/proc", str(pid)).exists() for pid in children))
    assert statuses(tmp_path) == {"first": "missing", "second": "missing"}
    assert "first is missing: interrupted." in out
    assert "second is missing: not run." in (tmp_path / "out" / "suite.md").read_text()


@pytest.mark.longest
def test_parts_take_turns_and_a_resumed_job_goes_on_from_their_rounds(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    rounds = "repetitions = 3, seconds = 0.5"
    both = part("first") + part("second")
    (tmp_path / "job.toml").write_text(both.replace("repetitions = 1, seconds = 0.001", rounds))
    files = [tmp_path / "out" / "parts" / name / ROUNDS_FILE for name in ("first", "second")]
    (tmp_path / "sitecustomize.py").write_text(ROOMY)
    with start(tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}") as process:
        wait_until(files[1].exists, 60)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    kept = [json.loads(file.read_text()) for file in files]
    made = [each["made"] for each in kept]
    assert made[0] - made[1] in (0, 1)
    assert statuses(tmp_path) == {"first": "incomplete", "second": "incomplete"}
    assert f"first is incomplete: interrupted after {made[0]} of 3 rounds." in out
    page, summary = ((tmp_path / "out" / name).read_text() for name in ("suite.html", "suite.md"))
    assert f"Incomplete: interrupted after {made[1]} of 3 rounds." in summary
    assert "| 4 KiB | shm |" in summary
    assert 'id="part-first-sweep-all_reduce-2"' in page

    for median in kept[1]["state"][0]["medians"]:
        median[-1] = [1000.0] * 2  # seconds, in rounds 1 and 2, which shows in the median of three
    files[1].write_text(json.dumps({**kept[1], "made": 2}))
    code, _, err = run(tmp_path, "--resume")
    assert code == 0, err
    assert statuses(tmp_path) == {"first": "done", "second": "done"}
    first, second = ({row["backend"]: row for row in each["results"]["rows"]} for each in results(tmp_path)["parts"])
    assert first["shm"]["time_ms"] < 1000
    assert second["shm"]["time_ms"] == 1e6
    assert second["shm"]["time_ms_interval"][0] < 1000


@dataclass
class Waiting:
    name: str
    share: float = 0.0
    begun: bool = True


def test_the_next_is_who_has_made_least_and_nobody_begins_without_room() -> None:
    a, b, c, d = Waiting("a", 0.5), Waiting("b", 0.25), Waiting("c", begun=False), Waiting("d", begun=False)
    assert next_of([a, b, c, d], 0.5) is c
    assert next_of([a, b, c, d], 0.49) is b
    assert next_of([c, d], 0.1) is c  # nobody waits, whose end would make room
    b.share = 0.5
    assert next_of([a, b, d], 0.2) is a


@pytest.mark.long
def test_a_part_that_dies_while_it_waits_is_told(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    (tmp_path / "job.toml").write_text(part("first").replace("repetitions = 1", "repetitions = 2") + part("second"))
    killed = tmp_path / "killed"
    (tmp_path / "sitecustomize.py").write_text(DIES.format(killed=str(killed)))
    code, _, err = run(tmp_path, PYTHONPATH=str(tmp_path))
    assert code == 1, err
    assert killed.exists()
    assert statuses(tmp_path) == {"first": "failed", "second": "done"}
    assert results(tmp_path)["parts"][0]["reason"] == "exit code -9 without a word"


def descendants(pid: int) -> list[int]:
    """Of a process, by /proc."""
    found = []
    for thread in Path("/proc", str(pid), "task").iterdir():
        for child in (thread / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def test_nothing_runs_if_a_part_cannot_be_right(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(part("good") + part("bad", more='arguments = ["x"]'))
    code, _, err = run(tmp_path)
    assert code == 2
    assert err.splitlines()[-1].startswith("benchmarks compare: UsageError: job.toml, part bad: arguments is for")
    assert not (tmp_path / "out" / "parts").exists()
