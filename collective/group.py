"""The ranks of one group and the collective operations between them: the door for NumPy and CuPy arrays."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType

import numpy as np
import numpy.typing as npt

from collective.algorithm import Algorithm, Watch, no_repeat
from collective.build import build, build_alone
from collective.call_tags import Array, Label
from collective.choice import MeetingPlace, choose_backend, topology_of
from collective.membership.joining import Meeting, introduce_outsider
from collective.membership.liveness import Mesh
from collective.membership.messenger import MeshMessenger
from collective.nccl.seat import NcclSeat, check_device
from common.errors import UsageError, choose
from common.launch.outsiders import check_rank_aloud
from common.network.links import CHECKSUMS
from common.network.patience import WAIT_LIMIT_S
from common.sync.messenger import ALONE, Messenger
from common.system.addresses import own_host, parse_address
from common.system.fault_points import fault_here, reach
from common.system.process import forget_in_children, note_joined, note_joining, restarts
from common.tensors.buckets import chunk_bounds
from common.tensors.reduction import Reduction

__all__ = ["Group", "connect"]


class Group:
    """One rank's membership. Every method is called by all ranks in the same order, from one thread at a time.

    A context manager: leaving it closes it; after an exception the other ranks learn the reason. In a child that this
    process forks the group is closed, without a word to anybody.

    Raises (every operation):
        PeerLost, PeerStalled: a rank died, failed or did not take part within the limits; it is named.
        ProtocolError: the ranks' calls do not match.
        RuntimeError: the group is closed, or another thread is in a call.
    """

    def __init__(self, algorithm: Algorithm, *, backend: str, epoch: int = 0, messenger: Messenger = ALONE) -> None:
        self._algorithm, self.messenger = algorithm, messenger
        self._repeat = no_repeat if fault_here() else algorithm.repeat
        self.algorithm, self.backend = algorithm.name, backend
        self.rank, self.nranks = algorithm.rank, algorithm.nranks
        self.epoch = epoch
        self.step: int | None = None  # that the last call was labelled with
        self._calls = 0
        self._shut = ""  # why no call can be made
        self._turn = threading.Lock()  # held by the thread that is in a call
        self._process = os.getpid()
        forget_in_children(self)

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32") -> Array:
        """An uninitialised array that the group reaches without a copy (any other array works too).

        With shared memory its memory is given back when the group is closed and the array gone: make it once and keep
        it.

        Raises:
            ValueError: the shape is negative.
            SharedMemoryTooSmall: the machine has not so much memory free.
        """
        if self._shut:
            raise RuntimeError(self._shut)
        count = int(np.prod(shape))
        if min(np.atleast_1d(shape), default=0) < 0:
            raise ValueError(f"shape must not be negative (got {shape})")
        return self._algorithm.empty(count, dtype).reshape(shape)

    def all_reduce(
        self,
        array: Array,
        op: str = "mean",
        *,
        step: int | None = None,
        bucket: int = 0,
        watch: Watch | None = None,
    ) -> None:
        """Replace `array`, on every rank, by the elementwise sum, mean or maximum over ranks; in place.

        Combined in the canonical order (common/tensors/canonical_order.py), in the array's own type (float16 in
        float32, rounded once), so that every backend and algorithm gives the same bits; but nccl, in
        an order of its own.

        Args:
            array: float32, float64, float16, int32 or int64; of equal size on all ranks, which must give it the same
                shape (that is not compared). One that is not contiguous is copied in and out. In an NCCL group also an
                array of CuPy or any DLPack producer.
            op: "sum", "mean" (not of integers) or "max" (NaN where any rank has NaN). Integer sums wrap. What sign
                and payload a NaN has is not defined.
            step, bucket: what the messages are labelled with; by default the number of calls so far.
            watch: of a mean of float32 or float64, of arrays of 1-D: is told of values that are not finite, where that
                costs nothing while all are added, else just before.

        Raises:
            ValueError, TypeError: the array or op is not of that kind.
        """
        with self._turn if not (self._shut or self._turn.locked()) else self._one_call():
            self.step = step
            if watch is None and self._repeat(array, op, self.epoch, self._calls + 1 if step is None else step, bucket):
                self._calls += 1
                return
            reach("before-reduce", self._calls if step is None else step)
            reduction, flat, scattered = self._prepared(array, op)
            if watch is None:
                self._algorithm.all_reduce(flat, reduction, self._label(step, bucket))
            else:
                self._algorithm.all_reduce_watched(flat, reduction, self._label(step, bucket), watch)
            self._restore(flat, scattered)

    def reduce_scatter(self, array: Array, op: str = "mean", *, step: int | None = None, bucket: int = 0) -> Array:
        """This rank's chunk of what `all_reduce` would compute: elements chunk_bounds(array.size, nranks)[rank]
        (common/tensors/buckets.py) of the flattened result, 1-D, perhaps empty.

        Of a contiguous array it is a view, at the chunk's own place; the rest of `array` is undefined afterwards.
        Arguments and errors are those of `all_reduce`; half of its bytes move.
        """
        with self._one_call():
            reduction, flat, _ = self._prepared(array, op)
            self._algorithm.reduce_scatter(flat, reduction, self._label(step, bucket))
            return flat[slice(*chunk_bounds(flat.size, self.nranks)[self.rank])]

    def gather_chunks(self, array: Array, *, step: int | None = None, bucket: int = 0) -> None:
        """Replace, on every rank, each of the array's `nranks` chunks (as in `reduce_scatter`) by that of the rank of
        the same number; in place. `reduce_scatter` and then this are an all-reduce. Dtypes as for `all_reduce`."""
        with self._one_call():
            _, flat, scattered = self._prepared(array, "sum")
            self._algorithm.gather_chunks(flat, self._label(step, bucket))
            self._restore(flat, scattered)

    def all_gather(self, array: Array) -> Array:
        """Every rank's `array` (equal shape and dtype), stacked in rank order: [nranks, *shape]."""
        with self._one_call():
            view = self._algorithm.view(array if hasattr(array, "__dlpack__") else np.asarray(array))
            out: Array = np.empty_like(view, shape=(self.nranks, *view.shape), order="C")
            out[self.rank] = view
            self._algorithm.all_gather(out.reshape(self.nranks, -1), self._label(None, 0))
            return out

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Replace `array`, on every rank, by rank `root`'s; in place. Dtypes as for `all_reduce`."""
        if not 0 <= root < self.nranks:
            raise ValueError(f"root must be a rank, 0..{self.nranks - 1} (got {root})")
        with self._one_call():
            _, flat, scattered = self._prepared(array, "sum")
            self._algorithm.broadcast(flat, root, self._label(None, 0))
            self._restore(flat, scattered)

    def barrier(self) -> None:
        """Block until every rank has called it."""
        with self._one_call():
            reach("before-barrier", self._calls)
            self._algorithm.barrier(self._label(None, 0))

    def share(self, array: Array) -> bool:
        """Make an array whose elements are equal on all ranks one memory of them all: what one rank writes, all have,
        once they have met (`barrier`). No other call may be given it then. When the group is closed, each rank has its
        elements to itself.

        Returns:
            whether, on all ranks, this was done: on one host, over shared memory, where the array is the whole of what
            `empty` made.
        """
        with self._one_call():
            _, flat, scattered = self._prepared(array, "sum")
            return scattered is None and self._algorithm.share(flat, self._label(None, 0))

    def close(self, reason: str = "") -> None:
        """Leave the group; idempotent."""
        if os.getpid() == self._process:
            self._shut = "the group is closed"
            reach("leaving", 0)
            self._algorithm.close(reason)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close("" if kind is None else f"{kind.__name__}: {error}")

    def _prepared(self, array: Array, op: str) -> tuple[Reduction, Array, Array | None]:
        """(what to do; the elements, 1-D: the same memory, or a copy if the array is not contiguous; then it too)."""
        view = self._algorithm.view(array)
        reduction = Reduction.of(op, view.dtype, self.nranks)
        flags = view.flags
        if not getattr(flags, "writeable", True):  # CuPy's always are
            raise ValueError("array must be writable, for it holds the result")
        if not flags.c_contiguous:
            return reduction, view.copy("C").reshape(-1), view
        return reduction, view if view.ndim == 1 else view.reshape(-1), None

    def _restore(self, flat: Array, scattered: Array | None) -> None:
        if scattered is not None:
            self._algorithm.restore(flat, scattered)

    def _next_label(self, step: int | None, bucket: int) -> Label:
        self.step = step
        if step is None and bucket == 0:
            return self.epoch, self._calls + 1, 0
        if not (0 <= (step or 0) < 1 << 64 and 0 <= bucket < 1 << 32):
            raise ValueError(f"step must be in 0..2^64-1 and bucket in 0..2^32-1 (got {step}, {bucket})")
        return self.epoch, self._calls + 1 if step is None else step, bucket

    def _label(self, step: int | None, bucket: int) -> Label:
        label = self._next_label(step, bucket)
        self._calls += 1
        return label

    def _one_call(self) -> threading.Lock:
        """What is to be held during a call. (As a generator with `contextmanager` it took 1 to 2 us, a tenth of a short
        all-reduce; and a lock is released whatever a signal handler raises.)"""
        if self._shut:
            raise RuntimeError(self._shut)
        if self._turn.locked():
            raise RuntimeError(
                f"rank {self.rank}: two threads call the group at the same time; all ranks must make the same calls in "
                "the same order, so let one thread make them, or give each thread a group of its own"
            )
        return self._turn

    def forget(self) -> None:
        """In a child that was forked."""
        self._shut = f"the group is that of process {self._process}, from which this one was forked"


def connect(
    rank: int,
    nranks: int,
    rendezvous: str = "127.0.0.1:8600",
    backend: str = "auto",
    *,
    device: str = "auto",
    nccl_binding: str = "cupy",
    algorithm: str = "auto",
    checksum: str = "auto",
    timeout: float = 30.0,
    wait_limit: float = WAIT_LIMIT_S,
) -> Group:
    """Join the group of `nranks` ranks that meets at `rendezvous`, where rank 0 listens; blocks until all have.

    Args:
        rendezvous: HOST:PORT, or unix-abstract:NAME for ranks of one host.
        backend: "shm" (one host), "tcp" (any), "nccl" (GPUs, NCCL's own order of summation), "nccl-ring" (GPUs, the
            canonical order), or "auto": nccl for a device gpu:K, else shm if the rendezvous is on this host (and the
            algorithm is not the ring), else tcp.
        device: where `empty` makes arrays: "cpu", "gpu:K", or "auto": by the backend. An NCCL group takes arrays of
            its GPU (CuPy's or of any DLPack producer) and of the host, which it copies to the GPU and back.
        nccl_binding: "cupy" or "pynccl" (collective/nccl/binding.py).
        algorithm: "ring" (each rank passes data to the next), "direct" (each rank reduces its chunk straight out of
            everyone's shared memory; over tcp what is short goes straight to its reducer, the rest round the ring),
            "hierarchical" (several hosts with equally many ranks, numbered host by host: shared memory inside a host,
            tcp between them), or "auto": hierarchical where backend tcp finds such hosts, else direct.
        checksum: of what tcp carries: "on", "off", or "auto": on between hosts unless it is encrypted, off on loopback.
        timeout: how long to wait for ranks to join, and for one that gives no sign of life, in seconds.
        wait_limit: how long to wait for one that is alive but does not come to a call, in seconds.

    Raises:
        UsageError: backend, device, algorithm and rendezvous do not go together; or CuPy, NCCL or the GPU is missing.
        RendezvousError, VersionMismatch, PeerUnreachable, PortInUse: the group did not come together.
    """
    parse_address(rendezvous)
    check_rank_aloud(rank, nranks, partial(introduce_outsider, rendezvous, rank, nranks))
    if not (timeout > 0 and wait_limit > 0):
        raise UsageError(f"timeout and wait_limit must be positive, in seconds (got {timeout}, {wait_limit})")
    choose("checksum", checksum, CHECKSUMS)
    check_device(device)
    note_joining(nranks)
    place = MeetingPlace.of(rendezvous)
    backend = choose_backend(backend, algorithm, device, place)
    seat = NcclSeat(rank, device, nccl_binding, local=place.local) if backend.startswith("nccl") else None
    if nranks == 1:
        return Group(alone(backend, algorithm, seat, timeout), backend=backend, epoch=restarts())
    with Meeting(rendezvous, rank, nranks, host=reached_at(place, backend), timeout=timeout) as meeting:
        met = meeting.introduce(plan_of(backend, algorithm, checksum, seat), seat.note if seat else b"")
        reach("introduced", 0)
        topology = topology_of(backend, algorithm, rank, met.hosts)
        mesh, connections = meeting.connect(met, near=topology.local, data=topology.linked, wait_limit=wait_limit)
    with left_on_error(mesh, connections):
        ring = topology.algorithm == "ring"
        built = seat.join(mesh, met.notes, ring=ring) if seat else build(backend, topology, mesh, connections, checksum)
    group = Group(built, backend=backend, epoch=restarts(), messenger=MeshMessenger(mesh))
    mesh.step = lambda: group.step
    note_joined()
    return group


@contextmanager
def left_on_error(mesh: Mesh, connections: Mapping[int, socket.socket]) -> Iterator[None]:
    """This process may go on in the next epoch."""
    try:
        yield
    except BaseException as exc:
        mesh.close(f"{type(exc).__name__}: {exc}")
        for each in connections.values():
            each.close()
        raise


def alone(backend: str, algorithm: str, seat: NcclSeat | None, timeout: float) -> Algorithm:
    """The algorithm of a group of one rank."""
    if not seat:
        return build_alone()
    ring = topology_of(backend, algorithm, 0, [""]).algorithm == "ring"
    return seat.join(Mesh(0, {}, timeout=timeout), [seat.note], ring=ring)


def reached_at(place: MeetingPlace, backend: str) -> str:
    """This host's address as the other ranks reach it; "" if they do through Unix sockets."""
    if not place.local:
        return own_host(place.host)
    return "127.0.0.1" if backend == "tcp" else ""


def plan_of(backend: str, algorithm: str, checksum: str, seat: NcclSeat | None) -> str:
    """What the group is to be, in words that must be equal on all ranks."""
    plan = backend if algorithm == "auto" else f"{backend} with algorithm {algorithm}"
    plan += "" if checksum == "auto" else f" with checksum {checksum}"
    return plan + (f" {seat.plan}" if seat else "")
