"""What a process does first, and that it ends with the launcher that started it, however that one dies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from common.system import process
from common.system.process import PARENT_VARIABLE, die_with_parent, prepare_process

LIMIT_S = 20.0
CHILD = """
import os, signal
from common.system.process import prepare_process
prepare_process()
os.write(1, b"%d\\n" % os.getpid())
signal.pause()
"""
NEVER_ENDS = """
import time
from common.system import process
process.END_S = 1
process.prepare_process()
class Last:
    def __del__(self, wait=time.sleep):
        wait(60)
last = Last()
print("all is done", flush=True)
"""
LAUNCHER = f"""
import os, signal, subprocess, sys
environment = {{**os.environ, {PARENT_VARIABLE!r}: str(os.getpid())}}
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment)
signal.pause()
"""


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_one_compute_thread_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    prepare_process()
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    prepare_process()
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_threads_switch_often_and_malloc_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[bool] = []
    monkeypatch.setattr(process, "tune_malloc", lambda: tuned.append(True))
    sys.setswitchinterval(0.005)
    prepare_process()
    assert sys.getswitchinterval() == pytest.approx(5e-4)
    assert tuned == [True]


def test_threads_of_a_users_program_take_turns_as_under_paddle() -> None:
    sys.setswitchinterval(0.005)
    prepare_process(of_user=True)
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_a_process_whose_end_takes_too_long_is_ended() -> None:
    done = subprocess.run([sys.executable, "-c", NEVER_ENDS], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (-signal.SIGALRM, "all is done\n"), done.stderr


def test_without_a_launcher_nothing_is_asked_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT_VARIABLE, raising=False)
    monkeypatch.setattr(process.ctypes, "CDLL", lambda *_, **__: pytest.fail("called"))
    die_with_parent()


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_dies_with_its_launcher(how: signal.Signals) -> None:
    with started(LAUNCHER, CHILD) as launcher:
        assert launcher.stdout is not None
        child = int(line_of(launcher.stdout.fileno()))
        try:
            launcher.send_signal(how)
            assert launcher.wait(LIMIT_S) == -how
            assert line_of(launcher.stdout.fileno()) == ""  # the end of a pipe that only the child still held
        finally:
            kill_if_alive(child)


@pytest.mark.processes
@pytest.mark.parametrize("waited_for", [True, False])
def test_a_child_whose_launcher_has_died_ends_at_once(*, waited_for: bool) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    if waited_for:
        gone.wait()
    try:
        assert run_with_parent(gone.pid, CHILD) == (1, "", "")
    finally:
        gone.wait()


@pytest.mark.processes
def test_a_grandchild_of_a_living_launcher_runs() -> None:
    code = "from common.system.process import prepare_process; prepare_process(); print('runs')"
    assert run_with_parent(os.getppid(), code) == (0, "runs\n", "")


def run_with_parent(parent: int, code: str) -> tuple[int, str, str]:
    environment = {**os.environ, PARENT_VARIABLE: str(parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    return done.returncode, done.stdout, done.stderr


@contextmanager
def started(*code: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", *code], stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line_of(pipe: int) -> str:
    """What comes next through the pipe, "" at its end."""
    assert select.select([pipe], [], [], LIMIT_S)[0], "neither a word nor the end of the pipe"
    return os.read(pipe, 100).decode()


def kill_if_alive(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
