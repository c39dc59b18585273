"""What a keeper does for a launcher, and for the next one: by processes that sleep or end at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from common.errors import UsageError
from common.launch import adoption as module
from common.launch import job as job_module
from common.launch.adoption import Adoption, KeptJob, adoption_of
from common.launch.child import ProcessFailed
from common.launch.job import Job
from common.launch.restarts import Life
from common.system.memory import Unreachable
from common.system.process import Terminated
from tests.support.commands import is_running, until
from tests.support.jobs import LIMIT_S, PAUSE

pytestmark = pytest.mark.processes
COMMAND = ("ps.run", "--adopt-for", "1", "/here")
NOTES = {"command": COMMAND, "state": {}}


class Kept:
    """Of one folder of logs; what is begun here ends with the test."""

    def __init__(self, folder: Path, seconds: float = 60.0) -> None:
        self.adoption = Adoption(seconds, folder, COMMAND)
        self.jobs: list[KeptJob] = []

    def begin(self) -> KeptJob:
        self.jobs.append(self.adoption.begin())
        return self.jobs[-1]

    def find(self) -> KeptJob:
        job = self.adoption.find()
        assert job
        self.jobs.append(job)
        return job

    def start(self, job: KeptJob, code: str, name: str = "rank 0", about: Any = "it") -> Any:
        with (self.adoption.log_dir / "log").open("ab") as log:
            return job.start(
                name, [sys.executable, "-c", code], environment={**os.environ}, streams={"stderr": log}, about=about
            )


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path)
    yield kept
    for job in kept.jobs:
        leave(job)
    for job in kept.jobs:
        until(lambda job=job: not psutil.pid_exists(job.parent) or is_zombie(job.parent), "the keeper's end")
        if job._process:
            job._process.wait(LIMIT_S)


def is_zombie(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def leave(job: KeptJob) -> None:
    """As a launcher that has nothing more to be taken over."""
    job.note(None)
    job._connection.close()


def test_the_next_launcher_knows_how_processes_have_ended(kept: Kept) -> None:
    first = kept.begin()
    ended = kept.start(first, "raise SystemExit(3)")
    killed = kept.start(first, PAUSE, "rank 1")
    lives = kept.start(first, PAUSE, "rank 2")
    first.note(NOTES)
    assert ended.wait(LIMIT_S) == 3
    first._connection.close()
    os.kill(killed.pid, signal.SIGKILL)
    second = kept.find()
    assert second.notes == {"command": [*COMMAND], "state": {}}
    assert {name: member["about"] for name, member in second.members.items()} == dict.fromkeys(
        ("rank 0", "rank 1", "rank 2"), "it"
    )
    assert [second.process(f"rank {rank}").pid for rank in range(3)] == [ended.pid, killed.pid, lives.pid]
    assert second.process("rank 0").poll() == 3
    assert second.process("rank 1").wait(LIMIT_S) == -signal.SIGKILL
    third = second.process("rank 2")
    assert third.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        third.wait(0.0)
    third.kill()
    assert third.wait(LIMIT_S) == third.poll() == -signal.SIGKILL


def test_what_is_held_outlives_the_launcher_and_who_takes_a_name_has_it(kept: Kept) -> None:
    first = kept.begin()
    memory = os.memfd_create("test")
    os.write(memory, b"kept")
    path = first.hold("rank 0", memory)
    os.close(memory)
    kept.start(first, "", "rank 0")
    again = kept.start(first, PAUSE, "rank 0")
    first.note(NOTES)
    first._connection.close()
    second = kept.find()
    assert second.hold("rank 0", -1) == path == f"/proc/{first.parent}/fd/{second.held['rank 0']}"
    (descriptor,) = second.open_held().values()
    assert os.pread(descriptor, 9, 0) == b"kept"
    os.close(descriptor)
    assert second.process("rank 0").pid == again.pid


def test_without_a_word_for_the_next_launcher_all_ends_with_this_one(kept: Kept) -> None:
    first = kept.begin()
    process = psutil.Process(kept.start(first, PAUSE).pid)
    assert first.folder.is_dir()
    assert first.folder.stat().st_mode & 0o777 == 0o700
    first._connection.close()
    until(lambda: not process.is_running(), "the end of the process")
    until(lambda: not first.folder.exists(), "the end of the folder")
    until(lambda: kept.adoption.find() is None, "nobody there")


def test_one_launcher_at_a_time_and_the_same_command(kept: Kept) -> None:
    first = kept.begin()
    kept.start(first, PAUSE)
    first.note(NOTES)
    with pytest.raises(UsageError, match=rf"^launcher {os.getpid()} watches the job in .*: end that first, or name"):
        kept.find()
    with pytest.raises(UsageError, match=r"^another launcher has just begun a job in .*; name another --log-dir$"):
        kept.begin()
    first._connection.close()
    other = Adoption(60.0, kept.adoption.log_dir, ("ps.run", "/elsewhere"))
    with pytest.raises(UsageError, match=r"the command that it was started with, 'ps\.run --adopt-for 1' in /here:"):
        other.find()
    without: Any = SimpleNamespace(restarts=SimpleNamespace(adopt_for=0.0), log_dir=kept.adoption.log_dir)
    with pytest.raises(UsageError, match=r"give that, or name another --log-dir$"):
        adoption_of(without, "ps.run", ["/here"])
    assert kept.find().launcher == os.getpid()


def test_the_keepers_end_is_that_of_all(kept: Kept) -> None:
    first = kept.begin()
    process = kept.start(first, PAUSE)
    os.kill(first.parent, signal.SIGKILL)
    until(lambda: is_zombie(first.parent), "its end")
    first.note(NOTES)  # nobody hears it
    with pytest.raises(ProcessFailed, match=rf"^the job's keeper \(process {first.parent}\) has died, and all proc"):
        kept.start(first, PAUSE)
    process.kill()
    assert process.wait(LIMIT_S) == -signal.SIGKILL


def test_a_launcher_that_is_told_to_end_as_it_takes_a_job_over_ends_it(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not leave it to the next one, though it has not entered the context yet."""
    first = kept.begin()
    process = psutil.Process(kept.start(first, PAUSE, about={"log": "workerlog.0", "on_terminal": False}).pid)
    first.note(NOTES)
    first._connection.close()

    def set_and_told(number: int, handler: Any) -> Any:
        before = signal.signal(number, handler)
        if number == signal.SIGTERM and signal.getsignal(number) != before:
            monkeypatch.undo()
            signal.raise_signal(number)
        return before

    names = {"signal": set_and_told, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
    monkeypatch.setattr(job_module, "signal", SimpleNamespace(**names))
    supervisor: Any = SimpleNamespace(beside=kept.find, note=lambda: None, note_end=lambda: None)
    with pytest.raises(Terminated), Job(kept.adoption.log_dir, life=Life(supervisor=supervisor)) as job:
        job.wait()
    assert not is_running(process)


def test_what_cannot_be_started_is_an_error(kept: Kept) -> None:
    first = kept.begin()
    with (kept.adoption.log_dir / "log").open("ab") as log, pytest.raises(FileNotFoundError):
        first.start("rank 0", ["/no/such"], environment={}, streams={"stderr": log}, about=None)


def test_a_name_that_another_user_has_taken(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise Unreachable("they are of different users (1 and 2)")

    monkeypatch.setattr(module, "check_user", refuse)
    kept.begin()
    with pytest.raises(UsageError, match=r"^another user's process has the name of the job in .*: they are of"):
        kept.find()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a child as another user")
def test_another_user_is_told_nothing(kept: Kept) -> None:
    first = kept.begin()
    first.note(NOTES)
    first._connection.close()
    code = f"""
import os, socket
os.setgroups([]); os.setgid(65534); os.setuid(65534)
stranger = socket.socket(socket.AF_UNIX)
stranger.connect({kept.adoption._address()!r})
print(stranger.recv(10))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert told.stdout == "b''\n", told.stderr
    kept.find()


def test_a_stranger_holds_no_launcher_up(kept: Kept) -> None:
    """One of this user, who says nothing."""
    first = kept.begin()
    first.note(NOTES)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(kept.adoption._address())
        process = kept.start(first, PAUSE)
    process.kill()
    assert process.wait(LIMIT_S) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"log_dir": None}, "^--adopt-for needs --log-dir, where processes write"),
        ({"trace": Path("t.json")}, "^--trace does not go with --adopt-for, whose job outlives its launcher: leave"),
        ({"on": SimpleNamespace(engine="ray")}, "^--engine does not go with --adopt-for"),
        ({"hosts": SimpleNamespace(count=2)}, r"^--adopt-for is for one host so far \(got 2\): leave it out$"),
    ],
)
def test_flags_that_do_not_go_with_it(given: dict[str, Any], text: str) -> None:
    config = {
        "restarts": SimpleNamespace(adopt_for=3.0),
        "on": SimpleNamespace(engine=None),
        "hosts": SimpleNamespace(count=1),
        "trace": None,
        "log_dir": Path("logs"),
    }
    with pytest.raises(UsageError, match=text):
        adoption_of(SimpleNamespace(**(config | given)), "ps.run", [])
    found = adoption_of(SimpleNamespace(**config), "ps.run", ["--x"])
    assert found == Adoption(3.0, Path("logs"), ("ps.run", "--x", str(Path.cwd())))
    off = config | {"restarts": SimpleNamespace(adopt_for=0.0)}
    assert adoption_of(SimpleNamespace(**(off | given)), "ps.run", []) is None
