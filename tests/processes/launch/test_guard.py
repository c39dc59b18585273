"""Nothing is left of ranks and their workers when a rank or the launcher is killed, or the terminal closed."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from common.launch.job import FOLDER, Job
from common.system import leftovers
from common.system.leftovers import Session, clear_away, members_of, session_of
from tests.support.commands import Started, is_running, until
from tests.support.jobs import PAUSE
from tests.support.jobs import start as start_rank

pytest.importorskip("paddle")
pytestmark = pytest.mark.processes
WORKERS = 2  # of each rank
PROGRAM = f"""
import signal
import numpy as np
from paddle.io import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return np.full(1000, index, np.float32)

batches = iter(DataLoader(Data(), batch_size=4, num_workers={WORKERS}))
next(batches)
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.pause()
raise RuntimeError("the other one is gone")
"""


class Loading:
    """A job of two ranks whose workers have put batches into shared memory."""

    def __init__(self, folder: Path, start: Callable[..., Started]) -> None:
        self._folder = folder  # for temporary files, where no other launcher clears away
        program = folder / "loads.py"
        program.write_text(PROGRAM)
        self.started = start("collective.run", "--nranks", 2, "--no-install", program)
        self.launcher = psutil.Process(self.started.process.pid)
        self.workers = until(self._workers, "workers with batches")
        self.ranks = [worker.parent() for worker in self.workers]
        self.guard = next(
            each for each in self.launcher.children() if "common.launch.guard" in " ".join(each.cmdline())
        )

    def _workers(self) -> list[psutil.Process]:
        found = [each for rank in self.launcher.children() for each in rank.children() if files_of(each.pid)]
        return found if len(found) == 2 * WORKERS else []

    @property
    def folders(self) -> list[Path]:
        return [*self._folder.glob(f"{FOLDER}{self.launcher.pid}-*")]

    def left(self) -> list[object]:
        """Processes but the launcher, files and folders."""
        processes: list[object] = [each for each in [*self.workers, *self.ranks, self.guard] if is_running(each)]
        return processes + self.folders + [file for worker in self.workers for file in files_of(worker.pid)]


def files_in(folder: Path) -> list[Path]:
    return [*folder.glob("paddle_*")]


def files_of(pid: int) -> list[Path]:
    return [*leftovers.SHARED_MEMORY.glob(f"paddle_{pid}_*")]


@pytest.fixture
def job(tmp_path: Path, start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch) -> Loading:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return Loading(tmp_path, start)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_nothing_is_left_of_a_launcher_that_is_killed(number: signal.Signals, job: Loading) -> None:
    assert job.folders
    os.killpg(job.launcher.pid, number)  # as the terminal's kernel does
    assert job.started.code == -number
    until(lambda: not job.left(), f"the end of {job.left()}")


def test_nothing_is_left_of_a_rank_that_is_killed(job: Loading) -> None:
    job.ranks[-1].kill()
    assert job.started.code == 128 + signal.SIGKILL
    assert job.left() == []


def test_nothing_is_left_of_one_that_fails_since_another_was_killed(job: Loading) -> None:
    """With it end its workers, of which nobody asks afterwards."""
    dead, fails = job.ranks[0], job.ranks[-1]
    dead.kill()
    until(lambda: not is_running(dead), "the end of the killed one")
    fails.send_signal(signal.SIGUSR1)
    assert job.started.code == 128 + signal.SIGKILL
    assert job.left() == []


def test_nothing_is_left_of_a_worker_that_ends_soon_after_its_killed_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the launcher still waits for other ranks."""
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    with Job() as job:
        rank = start_rank(job, 0, "import signal, subprocess; subprocess.Popen(['sleep', '100']); signal.pause()")
        (worker,) = until(psutil.Process(rank.pid).children, "the worker")
        (tmp_path / f"paddle_{worker.pid}_0_1").touch()
        rank.kill()
        rank.wait()
        assert job.failure().cause == "rank 0 was killed by SIGKILL"
        worker.kill()
        until(lambda: not is_running(worker), "the end of the worker")
        job.end(rank)
        assert not files_in(tmp_path)


def test_the_next_start_clears_away_after_a_launcher_whose_guard_was_killed_too(
    job: Loading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.guard.kill()
    job.launcher.kill()
    until(lambda: not any(is_running(rank) for rank in job.ranks), "the end of the ranks")
    assert len([worker for worker in job.workers if is_running(worker)]) == 2 * WORKERS
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Job():
        assert job.left() == []
    assert job.started.code == -signal.SIGKILL


def test_a_guard_that_was_killed_is_not_missed() -> None:
    with Job() as job:
        job._guard._process.kill()
        job._guard._process.wait()
        start_rank(job, 0, "")
        job.wait()


def test_processes_of_other_sessions_are_spared() -> None:
    """Also where the number of a leader that has ended was given to another process."""
    with Job() as job:
        spared, ended = (start_rank(job, rank, PAUSE) for rank in range(2))
        mine = session_of(spared.pid)
        assert members_of([mine]) == {spared.pid}
        clear_away([Session(spared.pid, (mine.started or 0) - 1), session_of(ended.pid)])
        assert ended.wait() == -signal.SIGKILL
        assert spared.poll() is None


def test_files_of_other_processes_are_spared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    gone, alive = 10_000_007, os.getpid()  # no process has so large a number
    names = [f"paddle_{gone}_1_1", f"paddle_{gone}0_1_1", f"paddle_{gone + 1}_1_1", f"other_{gone}_1", "paddle_x"]
    for name in [*names, f"paddle_{alive}_1_1"]:
        (tmp_path / name).touch()
    clear_away([Session(gone, 1)], also=[gone + 1, alive])
    assert sorted(os.listdir(tmp_path)) == sorted([names[1], names[3], names[4], f"paddle_{alive}_1_1"])
