"""Runs a Python program in a forked child of an interpreter that has imported Paddle already, instead of a new one.

`python -m MODULE`, `python -c CODE` and `python FILE` are run as they would be: a child of whoever starts it, with the
descriptors, environment, arguments and exit code that it would have. It takes 20 ms where importing Paddle takes 1.5 s.
Whatever is settled when an interpreter or a library starts (`python -X`, OMP_NUM_THREADS, ...) needs a new one, and a
process that has threads is not forked.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import logging
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Program", "fork", "fork_instead_of_new_interpreters", "program_of"]

AT_START = ("OMP_", "KMP_", "MKL_", "FLAGS_", "GLOG_", "LD_", "PYTHON")  # read before a program can set them
LATER = {"PYTHONUNBUFFERED", "PYTHONWARNINGS", "PYTHONPATH"}  # done here as an interpreter does at its start
BY_SKLEARN = {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}  # set where it is imported


@dataclass
class Program:
    """What is to be run, with the interpreter's options that matter."""

    kind: str  # "-m", "-c" or "" for a file
    what: str
    arguments: list[str]
    warnings: list[str] = field(default_factory=list)


def program_of(command: Sequence[Any], environment: Mapping[str, str]) -> Program | None:
    """The program of a command line; None if it needs an interpreter of its own."""
    first, *rest = map(os.fsdecode, command)
    if first != sys.executable or settled_at_start(environment) != settled_at_start(os.environ):
        return None
    said = []
    while rest and rest[0] in ("-u", "-W"):
        if rest.pop(0) == "-W":
            said.append(rest.pop(0))
    if not rest or (rest[0].startswith("-") and rest[0] not in ("-m", "-c")):
        return None
    kind = rest.pop(0) if rest[0] in ("-m", "-c") else ""
    return Program(kind, rest[0], rest[1:], said)


def settled_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(AT_START) and k not in LATER | BY_SKLEARN}


def fork_instead_of_new_interpreters(path: Sequence[str]) -> None:
    """From now on `subprocess` forks for Python programs; their sys.path ends with `path`."""
    start: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]

    def fork_or_start(command: Any, executables: Any, close: Any, keep: Any, cwd: Any, environ: Any, *rest: Any) -> int:
        given = dict(os.environ) if environ is None else dict(os.fsdecode(each).split("=", 1) for each in environ)
        program = program_of(command, given)
        threads = len(os.listdir("/proc/self/task"))
        if program is None or threads > 1 or any(map(callable, rest)):
            return start(command, executables, close, keep, cwd, environ, *rest)
        streams = (rest[0], rest[3], rest[5])  # p2cread, c2pwrite, errwrite
        inherited = set(keep) - {rest[7]}  # errpipe_write, whose end says that all is well
        return fork(program, command, streams, path, environment=given, cwd=cwd, keep=inherited, new_session=rest[9])

    subprocess._fork_exec = fork_or_start  # type: ignore[attr-defined]


def fork(
    program: Program,
    command: Sequence[Any],
    streams: Sequence[int],
    path: Sequence[str],
    *,
    environment: Mapping[str, str],
    cwd: Any = None,
    keep: Collection[int] = (),
    new_session: bool = True,
    without: Collection[str] = (),
) -> int:
    """Run a program in a child and return its process id.

    Args:
        streams: its stdin, stdout and stderr; -1: ours.
        without: packages that we have imported, and it has not.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 255
    try:
        signal.set_wakeup_fd(-1)
        if new_session:
            os.setsid()
        take_streams(streams, keep)
        if cwd is not None:
            os.chdir(cwd)
        forget_the_past()
        for name in [name for name in sys.modules if name.partition(".")[0] in without]:
            del sys.modules[name]
        os.environ.clear()
        os.environ.update(environment)
        show_command(command)
        begin_as_an_interpreter(program, path)
        code = run(program)
    except BaseException:
        traceback.print_exc()
    finally:
        end(code)


def take_streams(streams: Sequence[int], keep: Collection[int]) -> None:
    for number, descriptor in enumerate(streams):
        if descriptor == number:
            os.set_inheritable(number, True)
        elif descriptor != -1:
            os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:  # the one that listed them
                continue


def show_command(command: Sequence[Any]) -> None:
    """As this process's command line, in the place of that of whom we come from, as far as there is room: proc(5)."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    words = b"".join(os.fsencode(word) + b"\0" for word in command)[: end - start - 1]
    ctypes.memmove(start, words.ljust(end - start, b"\0"), end - start)


def forget_the_past() -> None:
    """Nothing of the process that was forked is to happen here again: its exit handlers, its signal handlers."""
    gc.freeze()  # what it has opened is not closed here either: the numbers are others' by now
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def begin_as_an_interpreter(program: Program, path: Sequence[str]) -> None:
    """What an interpreter sets up before it runs a program."""
    sys.argv = [{"-m": "-m", "-c": "-c"}.get(program.kind, program.what), *program.arguments]
    beside = os.getcwd() if program.kind == "-m" else "" if program.kind else str(Path(program.what).resolve().parent)
    sys.path[:] = [beside, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.path_importer_cache.clear()
    for option in [*filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")), *program.warnings]:
        warnings._setoption(option)  # type: ignore[attr-defined]
    through = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (writer(number, through=through) for number in (1, 2))
    seed()


def writer(number: int, *, through: bool) -> io.TextIOWrapper:
    binary: Any = open(number, "wb", 0 if through else -1, closefd=False)  # noqa: SIM115
    errors = "backslashreplace" if number == 2 else "strict"
    return io.TextIOWrapper(
        binary, "utf-8", errors, line_buffering=number == 2 or os.isatty(number), write_through=through
    )


def seed() -> None:
    """As different from others as a new interpreter; Python's own generator takes a seed when forked."""
    import numpy as np
    import paddle

    np.random.seed()
    paddle.framework.core.default_cpu_generator().seed()


def run(program: Program) -> int:
    """Its exit code; what ends it otherwise is told as an interpreter does."""
    try:
        if program.kind == "-m":
            sys.modules.pop(program.what, None)  # it may have been imported by whom we come from
            runpy.run_module(program.what, run_name="__main__", alter_sys=True)
        elif program.kind == "-c":
            main: dict[str, Any] = vars(sys.modules["__main__"])
            for name in [name for name in main if not name.startswith("__")]:
                del main[name]
            main["__spec__"] = None
            exec(compile(program.what, "<string>", "exec"), main)
        else:
            runpy.run_path(program.what, run_name="__main__")
    except SystemExit as exc:
        return exit_code(exc)
    except BaseException as exc:
        sys.last_type, sys.last_value, sys.last_traceback = type(exc), exc, exc.__traceback__
        sys.excepthook(type(exc), exc, exc.__traceback__)
        return 128 + signal.SIGINT if isinstance(exc, KeyboardInterrupt) else 1
    return 0


def exit_code(exc: SystemExit) -> int:
    if exc.code is None or isinstance(exc.code, int):
        return (exc.code or 0) & 0xFF
    print(exc.code, file=sys.stderr)
    return 1


def end(code: int) -> NoReturn:
    """As an interpreter does: wait for threads, call exit handlers, write what is buffered."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        code = code or 120
    os._exit(code)
