"""A GPU and an NCCL made of NumPy, for ranks that are threads: what runs without a GPU is the rest, as it is.

`FakeNccl` has the functions of `cupy.cuda.nccl` and `FakePynccl` those of `pynccl.binding`, with their signatures, so
the real bindings are tested over them. A call moves its data at once and blocks until the ranks it needs have come.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import secrets
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import numpy as np

from collective.nccl.binding import CupyBinding, PyncclBinding
from collective.nccl.cuda import Gpu
from common.system.memory import aligned_empty

DTYPES = {0: "i1", 1: "u1", 2: "i4", 3: "u4", 4: "i8", 5: "u8", 6: "f2", 7: "f4", 8: "f8"}  # nccl.h
REDUCTIONS = {0: np.add, 1: np.multiply, 2: np.fmax, 3: np.fmin}  # fmax: NCCL need not keep a NaN
LIMIT_S = 20.0
VERSION = 23007


class FakeArray(np.ndarray):
    """Device memory: NumPy's own functions work on it, and it has a pointer where CuPy's arrays have theirs."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self):
        return SimpleNamespace(id=0)


def on_gpu(array):
    return np.array(array).view(FakeArray)


class NcclError(RuntimeError):
    pass


class World:
    """What the communicators of one process have in common: who waits for whom."""

    def __init__(self):
        self.changed = threading.Condition()
        self.parts = defaultdict(dict)  # of collective calls that not every rank has come to
        self.mail = {}

    def box(self, identity, source, target):
        """What `source` sends to `target`; both may ask for it first, and at once."""
        with self.changed:
            return self.mail.setdefault((identity, source, target), queue.SimpleQueue())

    def exchange(self, key, comm, part):
        """Every rank's part, in rank order, once all have come to the same call; for ever if their parts differ."""
        deadline = time.monotonic() + LIMIT_S
        with self.changed:
            self.parts[key][comm.rank] = part
            self.changed.notify_all()
            while len(self.parts[key]) < comm.nranks or len({shape_of(p) for p in self.parts[key].values()}) > 1:
                if comm.aborted or time.monotonic() > deadline:
                    raise comm.reason or NcclError("aborted")
                self.changed.wait(0.01)
            return [self.parts[key][rank] for rank in range(comm.nranks)]


class FakeNccl:
    """As the module cupy.cuda.nccl, for all ranks of one process."""

    available = True
    NcclError = NcclError

    def __init__(self, version=VERSION):
        self.world, self.version = World(), version
        self.local = threading.local()  # a group belongs to a thread
        self.calls = []  # names of what was called, by any rank
        self.communicators = {}
        outer = self

        class NcclCommunicator(FakeCommunicator):
            def __init__(self, ndev, comm_id, rank):
                super().__init__(outer, ndev, comm_id, rank)

        self.NcclCommunicator = NcclCommunicator

    def get_version(self):
        return self.version

    def get_unique_id(self):
        return secrets.token_bytes(128)

    def interrupt(self, rank, error):
        """Let that rank's call, in which it is stuck, raise the error; in place of an end of the process."""
        self.communicators[rank].reason = error
        self.communicators[rank].aborted = True

    def interrupt_all(self, error):
        for rank in self.communicators:
            self.interrupt(rank, error)

    def groupStart(self):  # noqa: N802
        self.local.group = []

    def groupEnd(self):  # noqa: N802
        todo, self.local.group = self.local.group, None
        for _, act in sorted(todo, key=lambda each: each[0]):  # whatever sends goes before what waits
            act()


class FakeCommunicator:
    def __init__(self, nccl, nranks, identity, rank):
        assert isinstance(identity, bytes)
        assert len(identity) == 128
        self.nccl, self.nranks, self.rank, self.identity = nccl, nranks, rank, identity
        self.aborted = self.destroyed = False
        self.reason = None  # what a blocked call raises once it is aborted; NCCL's own error if not said
        self.asynchronous_error = None
        self.count = itertools.count()
        nccl.communicators[rank] = self
        nccl.world.exchange((identity, "init"), self, None)

    def check_async_error(self):
        if self.asynchronous_error:
            raise NcclError(self.asynchronous_error)

    def abort(self):
        self.aborted = True

    def destroy(self):
        self.destroyed = True

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):  # noqa: N802
        self.collective("AllReduce", recvbuf, count, read(sendbuf, count, datatype), op, lambda parts, f: f(parts))

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        mine = read(sendbuf, count, datatype)
        self.collective(
            "Reduce", recvbuf, count, mine, op, lambda parts, f: f(parts) if self.rank == root else mine.copy()
        )

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):  # noqa: N802
        mine = slice(self.rank * recvcount, (self.rank + 1) * recvcount)
        values = read(sendbuf, recvcount * self.nranks, datatype)
        self.collective("ReduceScatter", recvbuf, recvcount, values, op, lambda parts, f: f([p[mine] for p in parts]))

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):  # noqa: N802
        values = read(sendbuf, count, datatype)
        self.collective("AllGather", recvbuf, count * self.nranks, values, 0, lambda parts, f: np.concatenate(parts))

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        values = read(sendbuff, count, datatype)
        self.collective("Broadcast", recvbuff, count, values, 0, lambda parts, f: parts[root])

    def send(self, sendbuf, count, datatype, peer, stream):
        assert self.nccl.local.group is not None, "a send outside a group would wait for its receive"
        values = read(sendbuf, count, datatype).copy()
        self.nccl.calls.append("Send")
        box = self.nccl.world.box(self.identity, self.rank, peer)
        self.act(0, lambda: box.put(values))

    def recv(self, recvbuf, count, datatype, peer, stream):
        self.nccl.calls.append("Recv")
        box = self.nccl.world.box(self.identity, peer, self.rank)

        def receive():
            deadline, target = time.monotonic() + LIMIT_S, read(recvbuf, count, datatype)
            while not self.aborted and time.monotonic() < deadline:
                try:
                    values = box.get(timeout=0.01)
                except queue.Empty:
                    continue
                if (values.size, values.dtype) == (target.size, target.dtype):  # else NCCL may do anything: it hangs
                    target[...] = values
                    return
            raise self.reason or NcclError("aborted")

        self.act(1, receive)

    def collective(self, name, recvbuf, count, values, op, combine):
        self.nccl.calls.append(name)
        key, part = (self.identity, next(self.count)), values.copy()

        def act():
            parts = self.nccl.world.exchange(key, self, part)
            result = combine(parts, lambda each: REDUCTIONS[op].reduce(np.stack(each), 0).astype(values.dtype))
            read(recvbuf, count, values.dtype)[...] = result

        self.act(1, act)

    def act(self, order, act):
        group = getattr(self.nccl.local, "group", None)
        if group is None:
            act()
        else:
            group.append((order, act))


def shape_of(part):
    return None if part is None else (part.size, part.dtype)


def read(pointer, count, datatype):
    kind = np.dtype(DTYPES.get(datatype, datatype) if isinstance(datatype, int) else datatype)
    raw = (ctypes.c_char * (count * kind.itemsize)).from_address(pointer)
    return np.frombuffer(raw, kind)


class FakePynccl:
    """As the module pynccl.binding: ctypes structures, results checked by whoever calls."""

    class NcclV2Error(Exception):
        pass

    class ncclUniqueId(ctypes.Structure):  # noqa: N801
        _fields_ = [("internal", ctypes.c_char * 512)]

    def __init__(self, nccl):
        self.nccl, self.comms = nccl, {}

    def libnccl(self):
        return self

    def ncclGetVersion(self, version):  # noqa: N802
        version._obj.value = self.nccl.get_version()

    def ncclGetUniqueId(self, made):  # noqa: N802
        ctypes.memmove(ctypes.addressof(made._obj), b"\0\2" + self.nccl.get_unique_id()[2:], 128)

    def ncclCommInitRank(self, comm, nranks, identity, rank):  # noqa: N802
        assert isinstance(identity, self.ncclUniqueId)
        made = self.nccl.NcclCommunicator(nranks, bytes(identity)[:128], rank)
        self.comms[id(made)] = made
        comm._obj.value = id(made)

    def ncclGroupStart(self):  # noqa: N802
        self.nccl.groupStart()

    def ncclGroupEnd(self):  # noqa: N802
        self.nccl.groupEnd()

    def ncclCommGetAsyncError(self, comm, found):  # noqa: N802
        found._obj.value = 6 if self.comms[comm.value].asynchronous_error else 0

    def ncclCommAbort(self, comm):  # noqa: N802
        self.comms[comm.value].abort()

    def ncclCommDestroy(self, comm):  # noqa: N802
        self.comms[comm.value].destroy()

    def __getattr__(self, name):
        call = name.removeprefix("nccl")

        def forward(*arguments):
            *rest, comm, stream = arguments
            if not all(isinstance(number, int) and abs(number) < 2**63 for number in rest):
                raise self.NcclV2Error("ncclInvalidArgument")
            getattr(self.comms[comm.value], call[0].lower() + call[1:])(*rest, stream)

        return forward


class FakeGpu:
    """The methods of Gpu, with NumPy as CuPy. `stuck`: the GPU never comes to the mark."""

    index, identity = 0, "host 0000:00:04.0"

    def __init__(self):
        self.xp = FakeCupy
        self.stream = SimpleNamespace(ptr=7)
        self.stuck = self.depth = self.followed = 0
        self.is_marked = False
        self._pinned = []

    def __enter__(self):
        self.depth += 1
        return self

    def __exit__(self, *_):
        self.depth -= 1

    def follow_caller(self):
        self.followed += 1

    def mark(self):
        assert self.depth, "to be marked within the context"
        self.is_marked = True

    def done(self):
        assert self.is_marked
        return not self.stuck

    def holds(self, array):
        return isinstance(array, FakeArray)

    def empty(self, count, dtype):
        return np.empty(count, dtype).view(FakeArray)

    def pinned(self, count, dtype):
        array = aligned_empty(count, dtype)
        self._pinned.append((array.ctypes.data, array.ctypes.data + array.nbytes))
        return array

    is_pinned, adopt = Gpu.is_pinned, Gpu.adopt

    def upload(self, pinned, array):
        assert self.is_pinned(pinned)
        array[...] = pinned

    def download(self, array, pinned):
        assert self.is_pinned(pinned)
        pinned[...] = array


class FakeCupy:
    """What the algorithm uses of the module cupy."""

    ndarray = FakeArray
    add, maximum, multiply, isnan, zeros_like = np.add, np.maximum, np.multiply, np.isnan, np.zeros_like

    @staticmethod
    def where(*arguments):
        return np.where(*arguments).view(FakeArray)

    @staticmethod
    def from_dlpack(array):
        return np.from_dlpack(array).view(FakeArray)


def make_binding(name, nccl):
    return CupyBinding(nccl) if name == "cupy" else PyncclBinding(FakePynccl(nccl))
