"""NCCL through a Python binding: one small interface, made of CuPy's binding or of pynccl's."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common.errors import NcclFailed, UsageError, choose

__all__ = ["BINDINGS", "ID_BYTES", "CupyBinding", "NcclBinding", "PyncclBinding", "load_binding", "words"]

BINDINGS = ("cupy", "pynccl")
ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES of nccl.h, as are the numbers below
DTYPES = {"uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8}
OPS = {"sum": 0, "max": 2}
LIBRARY_VARIABLE = "NUMBA_NCCLLIB"  # of pynccl: the folder of libnccl.so.2
INSTALL = "pip install cupy-cuda12x nvidia-nccl-cu12 pynccl (for CUDA 13: cupy-cuda13x nvidia-nccl-cu13 pynccl)"


class NcclBinding(ABC):
    """One rank's communicator. Arrays are contiguous arrays of one GPU (CuPy's), streams the pointers of CUDA streams.

    What moves data is put on the stream and returns, except that NCCL may block in it, without limit, while it connects
    to a rank for the first time: call it under a Watchdog. The arrays belong to NCCL until the stream is past the call.

    Raises (every method):
        NcclFailed: NCCL said no.
    """

    name: str
    version: int  # of the NCCL library: 23007 is 2.30.7
    most_elements: int  # that one call can take

    @abstractmethod
    def unique_id(self) -> bytes:
        """ID_BYTES by which the ranks of a new group find each other; one rank makes it, the others are told."""

    @abstractmethod
    def init(self, nranks: int, unique_id: bytes, rank: int) -> None:
        """Join the group, on the current CUDA device. Blocks until all ranks have, without a limit of its own."""

    def all_reduce(self, array: Any, op: str, stream: int) -> None:
        """Replace the array by the "sum" or "max" over ranks, in NCCL's own order."""
        self._move("AllReduce", array, array, array.size, OPS[op], stream=stream)

    def reduce(self, array: Any, op: str, root: int, stream: int) -> None:
        """Likewise on rank `root` only; the other ranks' arrays stay as they are."""
        self._move("Reduce", array, array, array.size, OPS[op], root, stream=stream)

    def reduce_scatter(self, array: Any, out: Any, op: str, stream: int) -> None:
        """Write part `rank` of the reduction, of out.size elements, to `out`, which may be that part of `array`."""
        self._move("ReduceScatter", array, out, out.size, OPS[op], stream=stream)

    def all_gather(self, array: Any, out: Any, stream: int) -> None:
        """Write every rank's array to `out`, in rank order; `array` may be its own part of it."""
        self._move("AllGather", array, out, array.size, stream=stream)

    def broadcast(self, array: Any, root: int, stream: int) -> None:
        """Replace the array by rank `root`'s."""
        self._move("Broadcast", array, array, array.size, root, stream=stream)

    def send(self, array: Any, peer: int, stream: int) -> None:
        self._enqueue("Send", array.data.ptr, self._checked(array.size), DTYPES[array.dtype.name], peer, stream)

    def recv(self, array: Any, peer: int, stream: int) -> None:
        self._enqueue("Recv", array.data.ptr, self._checked(array.size), DTYPES[array.dtype.name], peer, stream)

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """The calls within go on together; without it a send and a receive would wait for one another."""
        self.group_start()
        try:
            yield
        finally:
            self.group_end()

    @abstractmethod
    def group_start(self) -> None: ...

    @abstractmethod
    def group_end(self) -> None: ...

    @abstractmethod
    def check(self) -> None:
        """Raise what has gone wrong in the background (ncclCommGetAsyncError); never blocks."""

    @abstractmethod
    def abort(self) -> None:
        """Make what is under way give up. Best effort: with a blocking communicator it can hang."""

    @abstractmethod
    def destroy(self) -> None:
        """Free the communicator, of which nothing may be under way. Idempotent."""

    @abstractmethod
    def _enqueue(self, call: str, *arguments: int) -> None:
        """Call ncclCALL with its arguments in the order of nccl.h, the communicator left out, the stream last."""

    def _move(self, call: str, source: Any, target: Any, count: int, *rest: int, stream: int) -> None:
        kind = DTYPES[source.dtype.name]
        self._enqueue(call, source.data.ptr, target.data.ptr, self._checked(count), kind, *rest, stream)

    def _checked(self, count: int) -> int:
        if count > self.most_elements:
            raise ValueError(
                f"{self.name} moves at most {self.most_elements:,} elements in one call (got {count:,}); "
                "use --nccl-binding cupy, or smaller arrays"
            )
        return count

    def _failed(self, call: str, exc: Exception) -> NcclFailed:
        return NcclFailed(f"NCCL {words(self.version)} failed in {call}: {exc}; NCCL_DEBUG=WARN makes it say more")


class CupyBinding(NcclBinding):
    """CuPy's `cupy.cuda.nccl`; 64-bit counts, only blocking initialisation. It lets go of the GIL while in NCCL."""

    name = "cupy"
    most_elements = 2**63 - 1

    def __init__(self, nccl: Any, *, ids_are_bytes: bool = True) -> None:
        self._nccl = nccl
        self._comm: Any = None
        self._ids_are_bytes = ids_are_bytes  # tuples of signed numbers before CuPy 14
        self.version = int(nccl.get_version())

    def unique_id(self) -> bytes:
        with self._translated("GetUniqueId"):
            return bytes(n % 256 for n in self._nccl.get_unique_id())

    def init(self, nranks: int, unique_id: bytes, rank: int) -> None:
        signed = tuple(n - 256 if n > 127 else n for n in unique_id)
        with self._translated("CommInitRank"):
            self._comm = self._nccl.NcclCommunicator(nranks, unique_id if self._ids_are_bytes else signed, rank)

    def group_start(self) -> None:
        self._nccl.groupStart()

    def group_end(self) -> None:
        with self._translated("GroupEnd"):
            self._nccl.groupEnd()

    def check(self) -> None:
        with self._translated("the background"):
            self._comm.check_async_error()

    def abort(self) -> None:
        if self._comm is not None:
            self._comm.abort()

    def destroy(self) -> None:
        if self._comm is not None:
            self._comm.destroy()

    def _enqueue(self, call: str, *arguments: int) -> None:
        try:
            getattr(self._comm, call[0].lower() + call[1:])(*arguments)
        except self._nccl.NcclError as exc:
            raise self._failed(call, exc) from exc

    @contextmanager
    def _translated(self, call: str) -> Iterator[None]:
        try:
            yield
        except self._nccl.NcclError as exc:
            raise self._failed(call, exc) from exc


class PyncclBinding(NcclBinding):
    """pynccl 0.1.2's ctypes functions (`pynccl.binding`), with its limits.

    Its counts are C ints, so a call takes fewer than 2^31 elements; its unique id is a structure of 512 bytes, of which
    NCCL reads the first 128; it knows no error beyond ncclInvalidUsage by its right name.
    """

    name = "pynccl"
    most_elements = 2**31 - 1

    def __init__(self, module: Any) -> None:
        self._module, self._api = module, module.libnccl()
        self._comm: Any = None
        number = ctypes.c_int()
        self._call("GetVersion", ctypes.byref(number))
        self.version = number.value

    def unique_id(self) -> bytes:
        made = self._module.ncclUniqueId()
        self._call("GetUniqueId", ctypes.byref(made))
        return bytes(made)[:ID_BYTES]  # its field `internal` would end at the first zero byte

    def init(self, nranks: int, unique_id: bytes, rank: int) -> None:
        kind = self._module.ncclUniqueId
        comm = ctypes.c_void_p()
        identity = kind.from_buffer_copy(unique_id.ljust(ctypes.sizeof(kind), b"\0"))
        self._call("CommInitRank", ctypes.byref(comm), nranks, identity, rank)
        self._comm = comm

    def group_start(self) -> None:
        self._call("GroupStart")

    def group_end(self) -> None:
        self._call("GroupEnd")

    def check(self) -> None:
        found = ctypes.c_int()
        self._call("CommGetAsyncError", self._comm, ctypes.byref(found))
        if found.value:
            raise self._failed("the background", RuntimeError(f"ncclResult_t {found.value}"))

    def abort(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            self._call("CommAbort", comm)

    def destroy(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            self._call("CommDestroy", comm)

    def _enqueue(self, call: str, *arguments: int) -> None:
        self._call(call, *arguments[:-1], self._comm, arguments[-1])

    def _call(self, call: str, *arguments: Any) -> None:
        try:
            getattr(self._api, f"nccl{call}")(*arguments)
        except (self._module.NcclV2Error, KeyError) as exc:  # KeyError: a result that pynccl has no name for
            raise self._failed(call, exc) from exc


def load_binding(name: str = "cupy") -> NcclBinding:
    """
    Raises:
        UsageError: unknown, or not installed; the message says what to install.
    """
    choose("NCCL binding", name, BINDINGS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a library is missing is said below, in one line
            if name == "pynccl":
                show_pynccl_the_library()
                return PyncclBinding(importlib.import_module("pynccl.binding"))
            cupy, nccl = importlib.import_module("cupy"), importlib.import_module("cupy.cuda.nccl")
    except ImportError as exc:
        raise UsageError(f"NCCL through {name} needs {exc.name or name}, which is not installed; {INSTALL}") from exc
    except Exception as exc:  # what pynccl raises where it finds no libnccl
        why = str(exc).splitlines()[0]
        names = f"{LIBRARY_VARIABLE} names the folder of libnccl.so.2"
        raise UsageError(f"{name} cannot load NCCL ({why}); {names}") from exc
    if not nccl.available:
        raise UsageError(f"CuPy finds no NCCL library (libnccl.so.2); {INSTALL}")
    return CupyBinding(nccl, ids_are_bytes=int(cupy.__version__.partition(".")[0]) >= 14)


def show_pynccl_the_library() -> None:
    """pynccl looks for libnccl.so.2 in one folder only, and not where pip puts NCCL."""
    with suppress(ModuleNotFoundError):  # no package named nvidia
        if found := importlib.util.find_spec("nvidia.nccl"):
            folders = [Path(each) / "lib" for each in found.submodule_search_locations or ()]
            for folder in folders:
                if (folder / "libnccl.so.2").exists():
                    os.environ.setdefault(LIBRARY_VARIABLE, str(folder))


def words(version: int) -> str:
    """
    >>> words(23007), words(2708)
    ('2.30.7', '2.7.8')
    """
    base = 10_000 if version >= 10_000 else 1000  # since NCCL 2.9
    return f"{version // base}.{version % base // 100}.{version % 100}"
