"""Fixtures for every test: the folder of real data, polling, and a guard against what a test leaves behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import thread as pools
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

import pytest

from benchmarks.records.progress import PROGRESS_VARIABLE, told_by
from common.kernels import loader
from common.kernels.names import COPY, MEETING, MIX, MIX_AND_LOOK, REPEAT, Whole
from common.system.process import PARENT_VARIABLE, prepare_process
from tests.support import warm
from tests.support.thorough import ALL, LONG

os.environ.pop(PARENT_VARIABLE, None)  # pytest itself has no launcher to die with
prepare_process()  # before anything imports Paddle or gRPC
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it, for children too, if in the background
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it

ROOT = Path(__file__).resolve().parents[1]
LEAVE_S = 5.0  # what has been told to end may take this long to be gone
POLL_S = 0.005
BEGUN = time.monotonic()
LIMIT_VARIABLE = "GRADSYNC_TEST_LIMIT_S"  # seconds that a run may take
FAULTS_VARIABLE = "GRADSYNC_FAULTS"  # set by `make faults`
FOLDERS = {"contracts": "contract", "faults": "faults", "processes": "processes", "system": "system"}  # markers

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("quick", deadline=None, derandomize=True, max_examples=50)
    settings.register_profile("thorough", deadline=None, derandomize=True, max_examples=500)
    settings.load_profile("thorough" if LONG else "quick")


def pytest_configure() -> None:
    """Loops that most tests need are compiled beforehand: whoever compiles says so on stderr."""
    calls = [Whole("short", op, "float32", n) for op in ("mean", "sum") for n in (2, 3, 4)]
    loader.fetch([COPY, MIX, MIX_AND_LOOK, *MEETING, REPEAT, *(str(each) for call in calls for each in call.family())])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each folder has its marker; tests marked `long` repeat, with much time, what others show a part of.

    Files that take long come first, so that no worker begins one when the others have ended.
    """
    for item in items:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        if folder in FOLDERS:
            item.add_marker(FOLDERS[folder])
        if item.get_closest_marker("long") and not LONG:
            item.add_marker(pytest.mark.skip(reason="takes long: make test-long"))
        if item.get_closest_marker("longest") and not ALL:
            item.add_marker(pytest.mark.skip(reason="takes minutes more: make test-long GRADSYNC_LONG_TESTS=all"))
        if folder == "faults" and not (item.get_closest_marker("quick") or os.environ.get(FAULTS_VARIABLE)):
            item.add_marker(pytest.mark.skip(reason="of the matrix of faults: make faults"))
    if items and hasattr(items[0].config, "workerinput"):
        items.sort(key=lambda item: not {"system", "processes", "faults"} & {mark.name for mark in item.iter_markers()})


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that took longer than its limit has failed, so that the time stays what it is."""
    limit, took = float(os.environ.get(LIMIT_VARIABLE) or "inf"), time.monotonic() - BEGUN
    if took > limit and not hasattr(session.config, "workerinput"):
        print(f"\nThe tests took {took:.0f} s, more than the {limit:.0f} s that they may take ({LIMIT_VARIABLE}).")
        print("Make them faster, or mark what repeats others `long` (--durations=30 says where the time goes).")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the real data sets: $GRADSYNC_DATA, or shared/data beside the checkout."""
    folder = Path(os.environ.get("GRADSYNC_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / "mnist").is_dir():
        pytest.skip(f"no real data: {folder} holds no folder mnist (GRADSYNC_DATA names another place)")
    return folder


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], object]], None]:
    """A function that polls a condition until it holds; an AssertionError after 20 s."""

    def wait(condition: Callable[[], object], limit: float = 20.0) -> None:
        deadline = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < deadline, f"not so within {limit:g} s"
            time.sleep(POLL_S)

    return wait


@pytest.fixture
def interrupted_when(
    tmp_path: Path, wait_until: Callable[..., None]
) -> Callable[[list[str], Callable[[str], bool]], subprocess.CompletedProcess[str]]:
    """A function that runs `python -m benchmarks ARGS` until what it says it does fulfils a condition; then Ctrl-C."""

    def run(args: list[str], reached: Callable[[str], bool]) -> subprocess.CompletedProcess[str]:
        told = tmp_path / "told"
        command = [sys.executable, "-m", "benchmarks", *args]
        environment = {**os.environ, PROGRESS_VARIABLE: str(told)}
        with warm.Popen(command, stdout=PIPE, stderr=PIPE, text=True, env=environment) as process:
            try:
                wait_until(lambda: reached(told_by(told)), 60)
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=30)
            finally:
                process.kill()
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return run


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves child processes, or threads that the interpreter's end would wait for."""
    before = held_threads() | child_processes().keys()
    yield
    deadline = time.monotonic() + LEAVE_S
    while (left := (held_threads() | child_processes().keys()) - before) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    threads = [where_in(t) for t in left if isinstance(t, threading.Thread)]
    children = {pid: command for pid, command in child_processes().items() if pid in left}
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    if threads or children:
        pytest.fail(f"left behind: threads {', '.join(threads)}; processes {children}")


def held_threads() -> set[threading.Thread | int]:
    """Threads that keep the interpreter from ending: non-daemon ones, and pool workers inside a task (gRPC's too)."""
    return {t for t in threading.enumerate() if t.is_alive() and (is_busy(t) if t in workers() else not t.daemon)}


def where_in(thread: threading.Thread) -> str:
    """The thread's name, and its innermost calls."""
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread.name} in {''.join(traceback.format_stack(frame)[-6:])}" if frame else thread.name


def workers() -> set[threading.Thread]:
    """The threads of every ThreadPoolExecutor; the interpreter's end wakes idle ones, and waits for the others."""
    return set(pools._threads_queues)


def is_busy(worker: threading.Thread) -> bool:
    frame = sys._current_frames().get(worker.ident or 0)
    return frame is not None and frame.f_code is not pools._worker.__code__


def child_processes() -> dict[int, str]:
    """Process ids and names of this process's children, zombies included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the usual case, found out cheaply
        return {}
    children = {}
    for pid in process_ids():
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it ended meanwhile
            continue
        if int(rest.split()[1]) == os.getpid() and not is_kept(pid):
            children[pid] = name
    return children


def process_ids() -> list[int]:
    """Of this process's children; of all processes where the kernel keeps no list of children."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    pids: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread ended meanwhile; its children are another's
            pids += map(int, Path(f"/proc/self/task/{task}/children").read_text().split())
    return pids


def is_kept(pid: int) -> bool:
    """multiprocessing's own helper, and the warm interpreter: they live as long as this one."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"resource_tracker" in command or b"tests.support.warm_server" in command
    except OSError:
        return False
