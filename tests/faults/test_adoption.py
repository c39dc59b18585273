"""Row 18, with --adopt-for: a job outlives its killed launcher, the same command takes it over, and whoever is killed
then or before is replaced: the others keep their processes, and the bits are those of the undisturbed run. When no
launcher comes, nothing is left."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytest.importorskip("paddle")

from common.launch.job import FOLDER
from common.system.fault_points import FAULT_VARIABLE
from tests.faults.jobs import LAUNCHERS, SCHEMES, Start
from tests.support.commands import JOB, Started, digest_in, is_running, until
from tests.support.warm import COLD_VARIABLE

STEPS, AT = 40, 20
POINT = {"collective": "before-reduce", "ps": "before-push"}
KEEPER = "common.launch.keeper"

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
schemes = pytest.mark.parametrize("scheme", SCHEMES)


@dataclass
class Orphans:
    """A job whose launcher was killed while rank 1 is frozen in the middle of a step, so that all stand there.

    Args:
        members: its processes by their names; the keeper is not among them.
        again: what starts the same command.
    """

    launcher: int
    keeper: psutil.Process
    members: dict[str, psutil.Process]
    folder: Path
    begin: Start
    died_at: float = 0.0

    def again(self, *flags: object) -> Started:
        return self.begin(*flags)

    def left(self) -> list[object]:
        """Processes and temporary folders."""
        running = [each for each in [*self.members.values(), self.keeper] if is_running(each)]
        return [*running, *Path(os.environ["TMPDIR"]).glob(f"{FOLDER}*")]

    @property
    def keepers_words(self) -> str:
        return (self.folder / "logs" / "keeperlog").read_text()


def orphans(scheme: str, start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, *given: object) -> Orphans:
    folder.mkdir()
    monkeypatch.setenv(FAULT_VARIABLE, f"{POINT[scheme]}:1:{AT}:stop")
    files = ["--json", folder / "record.json", "--log-dir", folder / "logs"]

    def begin(*flags: object) -> Started:
        return start(*LAUNCHERS[scheme], *JOB, "--steps", STEPS, *files, *given, *flags)

    with monkeypatch.context() as cold:
        cold.setenv(COLD_VARIABLE, "1")  # whose other interpreters see to it that nothing outlives a command
        job = begin()
    log = folder / "logs" / "workerlog.1"
    until(lambda: log.exists() and "GRADSYNC_FAULT_HERE" in log.read_text(), "the frozen rank")
    (keeper,) = psutil.Process(job.process.pid).children()
    assert KEEPER in " ".join(keeper.cmdline())
    found = Orphans(job.process.pid, keeper, members_of(keeper), folder, begin)
    os.kill(job.process.pid, signal.SIGKILL)
    assert job.code == -signal.SIGKILL
    found.died_at = time.monotonic()
    until(lambda: "has died" in found.keepers_words, "the keeper's word")
    return found


def members_of(keeper: psutil.Process) -> dict[str, psutil.Process]:
    found = {}
    for each in keeper.children():
        words = each.cmdline()
        server = any(word.endswith(".server") for word in words)
        name = "server 0" if server else f"rank {words[words.index('--rank') + 1]}"
        found[name] = each
    return found


def undisturbed(start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if not _undisturbed:
        monkeypatch.delenv(FAULT_VARIABLE, raising=False)
        folder.mkdir()
        done = start(*LAUNCHERS["collective"], *JOB, "--steps", STEPS, "--json", folder / "record.json")
        assert done.code == 0, done.err
        _undisturbed.append(digest_in(folder / "record.json"))
    return _undisturbed[0]


_undisturbed: list[str] = []


@schemes
@pytest.mark.parametrize("when", ["then", "before"])
def test_a_job_outlives_its_launcher_and_a_rank_that_is_killed_is_replaced(
    scheme: str, when: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = orphans(scheme, start, tmp_path / "job", monkeypatch, "--max-restarts", 3, "--adopt-for", 60)
    assert all(map(is_running, job.members.values()))
    if when == "before":
        job.members["rank 1"].kill()
    job.again("--adopt-for", 61).refused("waits for the command that it was started with", "--adopt-for 60' in ")
    next_one = job.again()
    if when == "then":
        until(lambda: "takes over the job" in next_one.err, "the next launcher")
        job.again().refused(f"launcher {next_one.process.pid} watches the job in ", "name another --log-dir")
        job.members["rank 1"].kill()
    until(lambda: "; rank 1 is started again (restart 1 of 3), the others go on" in next_one.err, "the replacement")
    others = [process for name, process in job.members.items() if name != "rank 1"]
    assert all(map(is_running, others))
    assert next_one.code == 0, next_one.err
    names = ", ".join(job.members)
    assert re.search(
        rf"takes over the job of launcher {job.launcher}, which died \S+ s ago: {names} \(epoch 0\)", next_one.err
    )
    assert re.search(r"recovered: all go on after step \d+, [01] steps? replayed, .* \(epoch 1\)", next_one.err)
    assert "complete after 1 restart (1 of a part, " in next_one.err
    assert digest_in(tmp_path / "job" / "record.json") == undisturbed(start, tmp_path / "undisturbed", monkeypatch)
    until(lambda: not job.left(), f"the end of {job.left()}")


@schemes
def test_a_job_that_no_launcher_comes_for_is_ended_and_nothing_is_left(
    scheme: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = orphans(scheme, start, tmp_path / "job", monkeypatch, "--adopt-for", 2)
    assert all(map(is_running, job.members.values()))
    until(lambda: not job.left(), f"the end of {job.left()}")
    assert time.monotonic() > job.died_at + 1.5
    assert job.keepers_words == (
        f"gradsync: launcher {job.launcher} has died; waits 2 s for the next one (--adopt-for)\n"
        f"gradsync: nobody came within 2 s (--adopt-for): ends {', '.join(job.members)}\n"
    )


@schemes
def test_a_launcher_that_took_a_job_over_ends_it_when_told_to(
    scheme: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = orphans(scheme, start, tmp_path / "job", monkeypatch, "--adopt-for", 60)
    next_one = job.again()
    until(lambda: "takes over the job" in next_one.err, "the next launcher")
    next_one.process.terminate()
    assert next_one.code == 128 + signal.SIGTERM, next_one.err
    assert job.left() == []


@schemes
def test_a_rank_that_died_without_a_launcher_is_told_of_by_the_next(
    scheme: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --max-restarts."""
    job = orphans(scheme, start, tmp_path / "job", monkeypatch, "--adopt-for", 60)
    job.members["rank 1"].kill()
    until(lambda: not is_running(job.members["rank 0"]), "the end of the other")
    next_one = job.again()
    assert next_one.code == 128 + signal.SIGKILL, next_one.err
    assert "rank 1 was killed by SIGKILL" in next_one.err
    assert job.left() == []
