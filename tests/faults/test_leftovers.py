"""Row 18: kill -9 of all ranks, of the launcher, and of the guard beside it leaves nothing, and the next start goes on
from the last commit, with the bits of the undisturbed run."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytest.importorskip("paddle")

from common.commit.folder import CommitFolder
from common.launch.job import FOLDER
from tests.faults.jobs import LAUNCHERS, SCHEMES, Once, Start
from tests.support.commands import JOB, Started, digest_in, is_running, until
from tests.support.ports import Port, ports_of, ports_of_all

STEPS, COMMIT_EVERY, PAST = 1200, 50, 100
GUARD = "common.launch.guard"

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
schemes = pytest.mark.parametrize("scheme", SCHEMES)


@dataclass
class Training:
    """A job that has made some commits.

    Args:
        processes: that the launcher has started; the guard is not among them.
        ports: at which these listen, and the launcher, and the guard.
    """

    started: Started
    folder: Path
    processes: list[psutil.Process]
    guard: psutil.Process
    ports: list[Port]

    def kill(self, *processes: psutil.Process) -> None:
        for each in processes:
            with suppress(psutil.NoSuchProcess):  # who has heard of another's end may be quicker
                each.kill()

    def left(self) -> list[object]:
        """Of its processes and ports; of its temporary folders."""
        running = [each for each in [*self.processes, self.guard] if is_running(each)]
        listening = {port.inode for port in ports_of_all()}
        return [*running, *(port for port in self.ports if port.inode in listening), *self.folders()]

    def folders(self) -> list[Path]:
        return [*Path(os.environ["TMPDIR"]).glob(f"{FOLDER}{self.started.process.pid}-*")]


def begin(start: Start, scheme: str, folder: Path, *flags: object) -> Started:
    folder.mkdir(exist_ok=True)
    files = ["--json", folder / "record.json", "--log-dir", folder / "logs", "--checkpoint-dir", folder / "commits"]
    return start(*LAUNCHERS[scheme], *JOB, "--steps", STEPS, *files, "--commit-every", COMMIT_EVERY, *flags)


def training(start: Start, scheme: str, folder: Path, *flags: object) -> Training:
    """One that is under way."""
    started = begin(start, scheme, folder, *flags)
    commits = CommitFolder(folder / "commits")
    until(lambda: commits.steps() and commits.steps()[-1] >= PAST, "commits")
    children = psutil.Process(started.process.pid).children()
    (guard,) = [each for each in children if GUARD in " ".join(each.cmdline())]
    ports = ports_of([started.process.pid, *(each.pid for each in children)])
    return Training(started, folder, [each for each in children if each != guard], guard, ports)


def undisturbed(start: Start, once: Once, folder: Path) -> str:
    def make() -> str:
        done = begin(start, "collective", folder)
        assert done.code == 0, done.err
        return digest_in(folder / "record.json")

    return once(f"{STEPS} steps", make)


def goes_on(start: Start, once: Once, scheme: str, folder: Path) -> None:
    again = begin(start, scheme, folder, "--resume")
    assert again.code == 0, again.err
    assert digest_in(folder / "record.json") == undisturbed(start, once, folder.parent / "undisturbed")


@schemes
def test_the_launcher_is_killed(scheme: str, start: Start, once: Once, tmp_path: Path) -> None:
    job = training(start, scheme, tmp_path / "job")
    assert job.folders()
    job.kill(psutil.Process(job.started.process.pid))
    assert job.started.process.wait(5) == -signal.SIGKILL
    until(lambda: not job.left(), "the end of all")
    goes_on(start, once, scheme, tmp_path / "job")


@schemes
def test_all_processes_are_killed_at_once(scheme: str, start: Start, once: Once, tmp_path: Path) -> None:
    job = training(start, scheme, tmp_path / "job")
    job.kill(*job.processes)
    assert job.started.code == 128 + signal.SIGKILL
    assert "was killed by SIGKILL" in job.started.err
    assert job.left() == []
    goes_on(start, once, scheme, tmp_path / "job")


@schemes
def test_all_processes_are_killed_at_once_and_started_again(
    scheme: str, start: Start, once: Once, tmp_path: Path
) -> None:
    job = training(start, scheme, tmp_path / "job", "--max-restarts", 1)
    job.kill(*job.processes)
    assert job.started.code == 0, job.started.err
    assert "recovered" in job.started.err
    assert digest_in(tmp_path / "job" / "record.json") == undisturbed(start, once, tmp_path / "undisturbed")
    assert job.left() == []


@schemes
def test_the_guard_is_killed_too_and_the_next_start_clears_away_what_is_nobodys(
    scheme: str, start: Start, once: Once, tmp_path: Path
) -> None:
    lives, dead = (training(start, scheme, tmp_path / name) for name in ("lives", "dead"))
    dead.kill(dead.guard, psutil.Process(dead.started.process.pid))
    dead.started.process.wait(5)
    until(lambda: not [each for each in dead.processes if is_running(each)], "the end of the processes")
    assert not (dead.folder / "record.json").exists(), "they trained to the end"
    assert dead.folders()
    folders = lives.folders()
    goes_on(start, once, scheme, tmp_path / "dead")
    assert dead.left() == []
    if lives.started.process.poll() is None:
        assert lives.folders() == folders
    assert lives.started.code == 0, lives.started.err
