"""Kernels ready to be called: found in a folder of this user's, compiled if they are not there, and mapped.

    $GRADSYNC_CACHE_DIR, or gradsync/ in $XDG_CACHE_HOME or ~/.cache, or of the user in /tmp: the first that this user
    can write to and nobody else, for what lies there is run. A file's name says what it was made from: this code,
    Numba, this kind of processor.

The first process that needs a kernel compiles it, and says so; others wait for the folder's lock. Where that cannot be
done, `why_not` says why and NumPy does the work. GRADSYNC_KERNELS=off asks for NumPy.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.metadata
import mmap
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import common
from common.errors import choose
from common.kernels.layout import (
    ARRAY_DATA,
    ARRAY_DTYPE,
    ARRAY_FLAGS,
    ARRAY_GOOD,
    ARRAY_NDIM,
    ARRAY_SHAPE,
    OBJECT_TYPE,
)
from common.kernels.names import COPY, MEETING, MIX, MIX_AND_LOOK, REPEAT, Reduce, Whole
from common.kernels.python_function import python_function
from common.system.private_files import OTHERS_WRITE, private_folder, user_folder

__all__ = [
    "CACHE_VARIABLE",
    "KERNELS_VARIABLE",
    "NO_FOLDER",
    "Kernel",
    "Loop",
    "cache_folder",
    "called",
    "copy_kernel",
    "fetch",
    "meeting_kernels",
    "mix_kernel",
    "reduce_kernel",
    "repeat_kernel",
    "whole_call",
    "why_not",
]

KERNELS_VARIABLE = "GRADSYNC_KERNELS"
CACHE_VARIABLE = "GRADSYNC_CACHE_DIR"
NO_FOLDER = "no folder for compiled code"
COMPILE_S = 60.0  # for the compiler, and for another process's; one kernel takes 0.8 s, each further one 0.1
POLL_S = 0.02

NATIVE: dict[str, Any] = {
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
}
UNUSED = ctypes.create_string_buffer(8)  # where Numba's convention writes what these kernels do not return

Loop = Callable[[Any, int, float], object]
Kernel = Callable[[], object]

_reason = ""  # why kernels cannot be had
_lock = threading.Lock()


def why_not() -> str:
    """Why NumPy does the work; empty if kernels can be had, as far as is known.

    Raises:
        UsageError: the variable that asks for NumPy is misspelt.
    """
    if choose(KERNELS_VARIABLE, os.environ.get(KERNELS_VARIABLE) or "auto", ("auto", "off")) == "off":
        return f"{KERNELS_VARIABLE}=off"
    return _reason


def reduce_kernel(kernel: Reduce) -> Loop | None:
    """Called with a table of addresses, a number of elements and the factor of a mean; None if it cannot be had, or is
    none of its siblings. The GIL is not held meanwhile."""
    siblings = kernel.siblings()
    if why_not() or kernel not in siblings:
        return None
    code = fetch(list(map(str, siblings)))
    if code is None:
        return None
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, NATIVE[kernel.dtype]
    )
    return partial(prototype(code[siblings.index(kernel)]), UNUSED, UNUSED)


@cache
def copy_kernel() -> Callable[[int, int, int], object] | None:
    """Called with the addresses that it copies to and from and a number of lines (copy_lines.py); None if it cannot be
    had. The GIL is not held meanwhile."""
    return _of_large_arrays(COPY, 3)


@cache
def mix_kernel(*, looks: bool = False) -> Callable[[int, int, int, int], object] | None:
    """Called with the addresses of states and of rows, a number of rows and the factor (mix_rows.py); None if it cannot
    be had. The GIL is not held meanwhile."""
    return _of_large_arrays(MIX_AND_LOOK if looks else MIX, 4)


def _of_large_arrays(name: str, arguments: int) -> Callable[..., object] | None:
    """All are compiled together."""
    every = [COPY, MIX, MIX_AND_LOOK]
    code = None if why_not() else fetch(every)
    if code is None:
        return None
    words = [ctypes.c_int64] * arguments
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *words)
    return partial(prototype(code[every.index(name)]), UNUSED, UNUSED)


def meeting_kernels(frame: int) -> list[Kernel] | None:
    """MEETING, of that frame; None if they cannot be had."""
    code = None if why_not() else fetch([*MEETING, REPEAT])
    return [called(address, frame) for address in code[: len(MEETING)]] if code else None


def repeat_kernel(known: npt.NDArray[np.int64]) -> Callable[..., bool] | None:
    """REPEAT, of that table; None if it cannot be had. It holds the GIL, but where it yields the core."""
    code = None if why_not() or not arrays_are_as_expected() else fetch([REPEAT])
    return python_function(REPEAT, code[0], known) if code else None


def whole_call(kernel: Whole) -> int | None:
    """The address of its code; None if it cannot be had."""
    if why_not() or kernel.dtype not in NATIVE or not arrays_are_as_expected():
        return None
    family = kernel.family()
    code = fetch(list(map(str, family)))
    return code[family.index(kernel)] if code else None


def called(address: int, table: int) -> Kernel:
    """A kernel with its table. Each further argument would take another 0.1 us."""
    return partial(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address), table)


@cache
def arrays_are_as_expected() -> bool:
    """Whether an array's object has its fields where kernels look for them."""
    array = np.zeros((2, 3))[1:]
    if sys.implementation.name != "cpython":
        return False

    def word(at: int) -> int:
        return ctypes.c_int64.from_address(at).value

    def number(at: int) -> int:
        return ctypes.c_int32.from_address(at).value

    at = id(array)
    return (
        word(at + OBJECT_TYPE) == id(np.ndarray)
        and word(at + ARRAY_DATA) == array.ctypes.data
        and number(at + ARRAY_NDIM) == array.ndim
        and [word(word(at + ARRAY_SHAPE) + 8 * axis) for axis in range(2)] == [1, 3]
        and word(at + ARRAY_DTYPE) == id(array.dtype)
        and number(at + ARRAY_FLAGS) & ARRAY_GOOD == ARRAY_GOOD
    )


def fetch(names: Sequence[str]) -> list[int] | None:
    """The addresses of these kernels' code, compiled if need be; None, from then on, if they cannot be had."""
    global _reason
    with _lock:
        try:
            folder = cache_folder()
            paths = [folder / f"{name}.{_made_from()}.code" for name in names]
            if not all(path.exists() for path in paths):
                _compile(folder, paths)
            return [_mapped(path) for path in paths]
        except (OSError, RuntimeError, importlib.metadata.PackageNotFoundError) as error:
            _reason = f"{error}"
            if isinstance(error, RuntimeError):  # after it was said that they are compiled
                print(f"gradsync: NumPy does the sums, with the same bits: {error}", file=sys.stderr, flush=True)
            return None


def cache_folder() -> Path:
    """
    Raises:
        PermissionError: there is none that only this user can write to.
    """
    try:
        return private_folder(_candidates(), refused_rights=OTHERS_WRITE)
    except PermissionError as exc:
        raise PermissionError(f"{NO_FOLDER}: {exc}") from None


def _candidates() -> Iterator[Path]:
    if given := os.environ.get(CACHE_VARIABLE):
        yield Path(given)
        return
    with suppress(RuntimeError):  # no home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradsync"
    yield user_folder()


@cache
def _made_from() -> str:
    """A digest of all that the machine code depends on."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    for package in ("numba", "llvmlite"):
        digest.update(importlib.metadata.version(package).encode())
    digest.update(platform.machine().encode())
    for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        if line.startswith(("flags", "Features", "model name", "CPU part", "CPU implementer")):
            digest.update(line.encode())
    return digest.hexdigest()[:16]


def _compile(folder: Path, paths: Iterable[Path]) -> None:
    """
    Raises:
        RuntimeError: it took too long or failed.
    """
    with _locked(folder / "lock"):
        missing = [path.name for path in paths if not path.exists()]
        if not missing:
            return
        loops = "1 loop" if len(missing) == 1 else f"{len(missing)} loops"
        print(f"gradsync: compiling {loops} for this processor, once", file=sys.stderr, flush=True)
        root = str(Path(common.__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-m", "common.kernels.compiler", str(folder.absolute()), *missing]
        try:
            subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": path},
                cwd=root,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=True,
                timeout=COMPILE_S,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"compiling loops took longer than {COMPILE_S:g} s") from None
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
            raise RuntimeError(f"compiling loops failed: {last}") from None


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One process at a time."""
    deadline, told = time.monotonic() + COMPILE_S, False
    with file.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    print("gradsync: waiting for the process that compiles loops", file=sys.stderr, flush=True)
                    told = True
                if time.monotonic() > deadline:
                    raise RuntimeError(f"another process has been compiling loops for {COMPILE_S:g} s") from None
                time.sleep(POLL_S)
        yield


_mappings: dict[Path, mmap.mmap] = {}  # for as long as this process lives: code may be called from anywhere


def _mapped(path: Path) -> int:
    """The address of the code in that file."""
    if path not in _mappings:
        with path.open("rb") as file:
            _mappings[path] = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC)
    return int(np.frombuffer(_mappings[path], np.uint8).ctypes.data)
