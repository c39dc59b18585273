"""Nothing is left of a job, however it is left."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import UsageError
from common.launch import job as launch
from common.launch import servers as servers_module
from common.launch.cli import run_command
from common.launch.joining import Joining
from common.launch.servers import start_servers, wait_for_file
from tests.support.jobs import LIMIT_S, PAUSE, WAIT_FOR_END_OF, Flags, start
from tests.support.short_job import Job

pytestmark = pytest.mark.processes
DEAF = "import signal, pathlib, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
TELL = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('ready\\n'); "
CHILD = """
import os, signal
from common.system.process import prepare_process
prepare_process()
os.write(1, b"here")
signal.pause()
"""
LAUNCHER = """
import sys
from common.launch.job import Job
with Job() as job:
    if "unguarded" in sys.argv:
        job._guard._process.kill()
    job.start("rank 0", ["-c", sys.argv[1]], log="workerlog.0", on_terminal=True)
    job.wait()
"""


def test_leaving_the_job_ends_all_even_after_an_exception() -> None:
    processes = []

    def fail(job: Job) -> None:
        processes.extend(start(job, rank, PAUSE) for rank in range(2))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Job() as job:
        fail(job)
    assert [process.returncode for process in processes] == [-signal.SIGTERM] * 2


def test_leaving_the_job_ends_a_stopped_process() -> None:
    with Job() as job:
        process = start(job, 0, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        begin = time.monotonic()
    assert process.returncode == -signal.SIGTERM
    assert time.monotonic() - begin < LIMIT_S


def test_leaving_the_job_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    with Job() as job:
        process = start(job, 0, DEAF + TELL + "signal.pause()", tmp_path / "ready")
        wait_for_file(tmp_path / "ready", job, timeout=LIMIT_S)
        begin = time.monotonic()
    assert process.returncode == -signal.SIGKILL
    assert 0.5 <= time.monotonic() - begin < LIMIT_S


@pytest.mark.parametrize(
    ("how", "code", "guarded"),
    [(signal.SIGTERM, 143, "guarded"), (signal.SIGKILL, -9, "guarded"), (signal.SIGKILL, -9, "unguarded")],
)
def test_children_end_with_a_launcher_that_is_told_to(how: signal.Signals, code: int, guarded: str) -> None:
    """Without its guard the kernel sees to it."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, CHILD, guarded], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    with launcher.stdout as pipe:
        try:
            assert next_of(pipe.fileno()) == b"here"
            launcher.send_signal(how)
            assert launcher.wait(LIMIT_S) == code
            assert next_of(pipe.fileno()) == b""  # nobody holds the pipe any more
        finally:
            launcher.kill()
            launcher.wait()


def next_of(pipe: int) -> bytes:
    assert select.select([pipe], [], [], LIMIT_S)[0], "neither a word nor the end of the pipe"
    return os.read(pipe, 100)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_processes_are_ended_comes_after_that(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as it is in a background job
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}

    def end() -> None:
        with Job():
            monkeypatch.setattr(launch, "end_all", lambda *_: [signal.raise_signal(number), ended.append(True)])

    with pytest.raises(SystemExit if number == signal.SIGTERM else KeyboardInterrupt):
        end()
    found = {each: signal.getsignal(each) for each in handlers}
    signal.signal(signal.SIGINT, ignored)
    assert ended
    assert found == handlers


def test_a_launcher_that_is_told_to_end_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def run(_: Flags) -> None:
        with Job():
            signal.raise_signal(signal.SIGTERM)

    assert run_command(Flags, run, prog="ps.run", args=[]) == 143
    assert capsys.readouterr().err == "ps.run: terminated (SIGTERM)\n"


def test_the_handler_of_sigterm_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Job():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("127.0.0.1:0", [["127.0.0.1", "0"], ["127.0.0.1", "0"]]),
        ("10.0.0.1:8600", [["10.0.0.1", "8600"], ["10.0.0.1", "8601"]]),
        ("[::1]:80", [["::1", "80"], ["::1", "81"]]),
    ],
)
def test_servers_listen_one_after_the_other(
    first: str, expected: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(servers_module, "wait_for_file", lambda path, job, **_: path.write_text(f"{path.name}\n"))
    with Job() as job:
        monkeypatch.setattr(job, "start", lambda name, command, log, environment: commands.append(command))
        assert start_servers(job, 2, nranks=4, timeout=3.0, first=first) == ["server-0", "server-1"]
    value = {flag: [command[command.index(flag) + 1] for command in commands] for flag in ("--host", "--port")}
    assert [list(pair) for pair in zip(value["--host"], value["--port"], strict=True)] == expected
    assert [command[command.index("--shard") + 1] for command in commands] == ["0/2", "1/2"]


def test_what_a_child_has_started_ends_with_the_job(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    told = tmp_path / "grandchild"
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(told)!r}, "w").write(f"{{child.pid}}\\n")
"""
    with Job() as job:
        job.start("rank 0", ["-c", code], log="workerlog.0")
        job.wait()
        grandchild = Path("/proc", told.read_text().strip())
        assert grandchild.exists()
    wait_until(
        lambda: not grandchild.exists() or "Z" in (grandchild / "stat").read_text().rpartition(")")[2].split()[0]
    )


def test_folders_of_killed_launchers_are_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "gradsync-999999999-abc").mkdir()
    (tmp_path / f"gradsync-{os.getppid()}-abc").mkdir()
    with Job() as job:
        assert {p.name for p in tmp_path.iterdir()} == {f"gradsync-{os.getppid()}-abc", job.scratch.name}
    assert [p.name for p in tmp_path.iterdir()] == [f"gradsync-{os.getppid()}-abc"]


def test_servers_may_outlive_the_ranks_of_this_host_if_others_have_some() -> None:
    with Job(all_ranks_here=False, idle=0.0) as job:
        rank = job.start("rank 0", ["-c", ""], log="workerlog.0")
        job.start("server 0", ["-c", WAIT_FOR_END_OF, str(rank.pid), "0"], log="serverlog.0")
        job.wait()


def test_servers_that_nobody_joined_end_with_a_reason() -> None:
    with Job(idle=0.2) as job:
        job.start("server 0", ["-c", PAUSE], log="serverlog.0")
        job.start("rank 0", ["-c", ""], log="workerlog.0")
        with pytest.raises(UsageError, match=r"the program never joined \(does it call init_parallel_env\(\)"):
            job.wait()


def test_a_program_that_makes_no_group_ends_well_and_its_servers_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    with Job(joining=Joining(["mine.py"], "ps", 1, 600.0)) as job:
        job.start("server 0", ["-c", PAUSE], log="serverlog.0")
        job.start("rank 0", ["-c", ""], log="workerlog.0")
        job.wait()
    assert time.monotonic() - begin < Job.idle
    assert "ps.run: no rank of mine.py joined the group: they ran apart" in capsys.readouterr().err


def test_a_terminal_has_its_cursor_back_after_a_job_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that hid it, for its progress bar, is ended before it can show it again."""
    master, slave = os.openpty()
    os.set_blocking(master, False)
    with os.fdopen(slave, "w") as terminal, os.fdopen(master, "rb", 0) as shown:
        monkeypatch.setattr("sys.stdout", terminal)
        with Job() as job:
            job.start("rank 0", ["-c", PAUSE], log="workerlog.0", on_terminal=True)
        assert shown.read(100) == b"\x1b[?25h\r\n"
