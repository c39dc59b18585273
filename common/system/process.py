"""What every GradSync process does first: one compute thread, MKL's full code, tuned malloc, and an end with its
parent."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import NoReturn, Protocol
from weakref import WeakSet

from common.system.fault_points import reach
from common.system.memory import tune_malloc
from common.system.mkl import set_cpu_type
from common.system.sigterm import PARENT_VARIABLE, quiet_once_paddle_is_there
from common.system.switching import switch_often

__all__ = [
    "COMPLETE",
    "DONE",
    "JOB_SECRET_VARIABLE",
    "JOINED_VARIABLE",
    "LAST_WORDS_VARIABLE",
    "PARENT_VARIABLE",
    "RESTARTS_VARIABLE",
    "SAYS",
    "STARTED",
    "Terminated",
    "call_at_end",
    "die_with_parent",
    "forget_in_children",
    "last_words",
    "note",
    "note_children",
    "note_done",
    "note_joined",
    "note_joining",
    "prepare_process",
    "restarts",
    "say",
]

JOB_SECRET_VARIABLE = "GRADSYNC_JOB_SECRET"  # of all processes of a job on one host, from its launcher; empty: none
JOINED_VARIABLE = "GRADSYNC_JOINED"  # the launcher's file in which this process notes that it joins a group
COMPLETE = "complete"  # a line there: it has
DONE = "done"  # another one: nothing is lost with it any more
STARTED = "started"  # how one begins that holds the numbers of the processes that end with this one
SAYS = "says"  # how lines there begin that are for the launcher's terminal
RESTARTS_VARIABLE = "GRADSYNC_RESTARTS"  # how often a launcher has mended this job after a failure
END_S = 30  # seconds that Python and C may take for the end of a process when all else is done
LAST_WORDS_VARIABLE = "GRADSYNC_LAST_WORDS"  # its file for them, where this process shares its terminal


class Terminated(SystemExit):
    """This process was told to end, by SIGTERM; `run_command` says so once all is left in order."""

    EXIT_CODE = 128 + signal.SIGTERM

    def __init__(self) -> None:
        super().__init__(self.EXIT_CODE)


def prepare_process(*, of_user: bool = False) -> None:
    """Call before Paddle is imported.

    Args:
        of_user: it runs a user's program, whose threads take turns as they do under Paddle.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a second thread does nothing for convolutions, and spins
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it writes a line for each stranger whom it turns away
    set_cpu_type()
    warnings.filterwarnings("ignore", "No ccache found")  # Paddle's, at import, about compiling extensions
    if not of_user:
        switch_often()
    tune_malloc()
    quiet_once_paddle_is_there()
    die_with_parent()
    atexit.unregister(end_in_time)
    atexit.register(end_in_time)  # the first one is called last


def end_in_time() -> None:
    """Have the kernel end this process by SIGALRM if it still runs after END_S, when what others have left to `atexit`
    is done. Then objects are dropped and C code ends, and nobody in it could tell if that waits for ever: one of some
    400 ranks behind a cut link, which had done everything, was still there after 37 s."""
    signal.alarm(END_S)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however it dies: our launcher, or one started by it."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(parent) and not _runs(parent):  # it died before the call
        os._exit(1)


def _runs(process_id: str) -> bool:
    """Neither gone nor a zombie, whose end nobody has asked for yet."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # proc(5)


@contextmanager
def last_words() -> Iterator[None]:
    """What is written to sys.stderr within says why this process fails.

    A process that shares its launcher's terminal leaves it to the launcher, which knows who failed first and shows only
    that one's words; else every rank would show the same error.
    """
    file = os.environ.get(LAST_WORDS_VARIABLE)
    if not file or os.environ.get(PARENT_VARIABLE) != str(os.getppid()):
        yield
        return
    with Path(file).open("a") as out, redirect_stderr(out):
        yield


def note(line: str) -> None:
    """Let the launcher, if one of ours has started this process, know this."""
    if file := os.environ.get(JOINED_VARIABLE):
        with suppress(OSError), Path(file).open("a") as out:  # it fails where the launcher is gone, or on another host
            out.write(f"{line}\n")


def say(line: str) -> None:
    """On stderr, for whoever trains; also on the launcher's terminal, where this process's stderr goes to a log."""
    print(line, file=sys.stderr, flush=True)
    note(f"{SAYS} {line}")


def note_joining(nranks: int) -> None:
    """Let it know that this process joins a group of so many ranks."""
    reach("joining", 0)
    note(str(nranks))


def note_children() -> None:
    """Let it know of the workers of this process's loaders, which end with it: nobody can ask for them afterwards, and
    what they have put into shared memory stays."""
    from multiprocessing import active_children

    if children := active_children():
        note(f"{STARTED} {' '.join(str(child.pid) for child in children)}")


def note_done() -> None:
    """Let it know that this process has done all that it had to, however it ends."""
    note(DONE)


def note_joined() -> None:
    """Let it know that the group is complete, if it has more than one rank."""
    note(COMPLETE)
    reach("joined", 0)


def restarts() -> int:
    """How often this process's job has been mended after a failure; the epoch of its groups. It grows under those who
    outlive another one's death (next_epoch.py)."""
    return int(os.environ.get(RESTARTS_VARIABLE) or 0)


_at_end: list[Callable[[], object]] = []


def call_at_end(leave: Callable[[], object]) -> None:
    """Have `leave()` called when this process ends, also where its main thread ends it well by `os._exit(0)`, which
    leaves out what `atexit` has. A forked child inherits this."""
    atexit.register(leave)
    _at_end.append(leave)
    if len(_at_end) > 1:
        return
    at_once = os._exit

    def end_in_order(status: int) -> NoReturn:
        if status == 0 and threading.current_thread() is threading.main_thread():
            for each in reversed(_at_end):
                with suppress(Exception):  # so that the others are called too
                    each()
        at_once(status)

    vars(os)["_exit"] = end_in_order


class Forgetful(Protocol):
    def forget(self) -> None: ...


_forgetful: WeakSet[Forgetful] = WeakSet()


def forget_in_children(each: Forgetful) -> None:
    """Have `each.forget()` called in every child that this process forks, as long as it is used here.

    A child inherits open sockets: while it keeps them, nobody notices that its parent died.
    """
    if not _forgetful:
        os.register_at_fork(after_in_child=_forget)
    _forgetful.add(each)


def _forget() -> None:
    for each in list(_forgetful):
        with suppress(Exception):  # so that the others are forgotten too
            each.forget()
