"""The ranks of one group and the collective operations between them: the door for NumPy arrays."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from collective.memory import make_memory_ring
from collective.mesh import Listener, build_mesh
from collective.ring import all_gather_steps, reduce_scatter_steps
from collective.shm import ShmTransport
from collective.tcp import TcpTransport
from collective.transport import SEGMENT_BYTES, Array, Tag, Transport
from common.addresses import own_host
from common.buckets import chunk_bounds, segments
from common.config import check_rank
from common.errors import UsageError, choose
from common.reduction import mean_scale
from common.rendezvous import RendezvousServer, join

__all__ = ["BACKENDS", "OPS", "Group", "connect"]

BACKENDS = ("auto", "shm", "tcp")
OPS = ("sum", "mean")
REDUCE_SCATTER, ALL_GATHER, GATHER, BROADCAST = range(4)  # the algorithm in a tag's phase, and from
PHASES = 4  # there on the dtype and op of an all-reduce
DTYPES = ("float32", "float64", "int32", "int64")


class Group:
    """One rank's membership. Every method is called by all ranks in the same order, from one thread at a time.

    A context manager: leaving it closes it; after an exception the other ranks learn the reason.

    Raises (every operation):
        PeerLost, PeerStalled: a rank died, failed or did not take part within the timeout; it is named.
        ProtocolError: the ranks' calls do not match.
    """

    def __init__(self, transport: Transport, *, backend: str | None = None, epoch: int = 0) -> None:
        self._transport = transport
        self.backend = backend or transport.name
        self.rank, self.nranks = transport.rank, transport.nranks
        self.epoch = epoch
        self._calls = 0
        self._closed = False
        self._resources = ExitStack()

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32") -> Array:
        """An uninitialised array that the group reaches without a copy (any other array works too)."""
        return self._transport.empty(int(np.prod(shape)), dtype).reshape(shape)

    def all_reduce(self, array: Array, op: str = "mean", *, step: int | None = None, bucket: int = 0) -> None:
        """Replace `array`, on every rank, by the elementwise sum or mean over ranks; in place.

        Summed in the canonical order (common/reduction.py), in the array's own type. Each rank sends and receives
        2(N-1)/N of the array.

        Args:
            array: contiguous; float32, float64, int32 or int64; of equal shape on all ranks.
            op: "sum" or "mean" (not of integers).
            step, bucket: what the messages are labelled with; by default the number of calls so far.

        Raises:
            ValueError, TypeError: the array or op is not of that kind.
        """
        flat = self._flat(array, op)
        kind = DTYPES.index(flat.dtype.name) * len(OPS) + OPS.index(op)  # ranks that differ must not add up
        scale = mean_scale(self.nranks, flat.dtype) if op == "mean" else None
        tag = self._tag(step, bucket)
        bounds = chunk_bounds(flat.size, self.nranks)
        for i, (send, receive) in enumerate(reduce_scatter_steps(self.rank, self.nranks)):
            last = i == self.nranks - 2
            self._reduce_step(
                flat, bounds[send], bounds[receive], (*tag, REDUCE_SCATTER + PHASES * kind, i), scale if last else None
            )
        for i, (send, receive) in enumerate(all_gather_steps(self.rank, self.nranks)):
            self._copy_step(
                flat[slice(*bounds[send])], flat[slice(*bounds[receive])], (*tag, ALL_GATHER + PHASES * kind, i)
            )
        self._transport.flush()

    def all_gather(self, array: Array) -> Array:
        """Every rank's `array` (equal shape and dtype), stacked in rank order: [nranks, *shape]."""
        if self._closed:
            raise RuntimeError("the group is closed")
        mine = np.array(array, order="C")
        out: npt.NDArray[Any] = np.empty((self.nranks, *mine.shape), mine.dtype)
        out[self.rank] = mine
        rows = out.reshape(self.nranks, -1)
        tag = self._tag(None, 0)
        for i, (send, receive) in enumerate(all_gather_steps(self.rank, self.nranks)):
            self._copy_step(rows[send], rows[receive], (*tag, GATHER, i))
        self._transport.flush()
        return out

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Replace `array`, on every rank, by rank `root`'s; in place; contiguous."""
        check_rank(root, self.nranks)
        flat = self._flat(array, "sum")
        tag = self._tag(None, root)
        for k, (a, b) in enumerate(segments(0, flat.size, self._limit(flat))):
            this = Tag(self.epoch, *tag, BROADCAST, 0, k)
            if self.rank != root:
                self._transport.receive_into(flat[a:b], this)
            if (self.rank + 1) % self.nranks != root:
                self._transport.send(flat[a:b], this)
        self._transport.flush()

    def barrier(self) -> None:
        """Block until every rank has called it."""
        self.all_gather(np.zeros(1, np.uint8))

    def close(self, reason: str = "") -> None:
        """Leave the group; idempotent."""
        self._closed = True
        self._transport.close(reason)
        self._resources.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close("" if kind is None else f"{kind.__name__}: {error}")

    def _reduce_step(
        self,
        flat: Array,
        send: tuple[int, int],
        receive: tuple[int, int],
        tag: tuple[int, int, int, int],
        scale: np.generic | None,
    ) -> None:
        """Send one chunk on; add another, which arrives, to one's own; scale it where it is complete."""
        outgoing = list(segments(*send, self._limit(flat)))
        incoming = list(segments(*receive, self._limit(flat)))
        for k in range(max(len(outgoing), len(incoming))):
            this = Tag(self.epoch, *tag, k)
            if k < len(outgoing):
                self._transport.send(flat[slice(*outgoing[k])], this)
            if k < len(incoming):
                own = flat[slice(*incoming[k])]
                np.add(self._transport.receive(own, this), own, out=own)
                if scale is not None:
                    np.multiply(own, scale, out=own)

    def _copy_step(self, outgoing: Array, incoming: Array, tag: tuple[int, int, int, int]) -> None:
        """Send one run of elements on, and replace another by what arrives."""
        cuts_out = list(segments(0, outgoing.size, self._limit(outgoing)))
        cuts_in = list(segments(0, incoming.size, self._limit(incoming)))
        for k in range(max(len(cuts_out), len(cuts_in))):
            this = Tag(self.epoch, *tag, k)
            if k < len(cuts_out):
                self._transport.send(outgoing[slice(*cuts_out[k])], this)
            if k < len(cuts_in):
                self._transport.receive_into(incoming[slice(*cuts_in[k])], this)

    def _tag(self, step: int | None, bucket: int) -> tuple[int, int]:
        self._calls += 1
        return (self._calls if step is None else step), bucket

    def _limit(self, flat: Array) -> int:
        return SEGMENT_BYTES // flat.itemsize

    def _flat(self, array: Array, op: str) -> Array:
        if self._closed:
            raise RuntimeError("the group is closed")
        if not isinstance(array, np.ndarray):
            raise TypeError(f"array must be a numpy.ndarray (got {type(array).__name__})")
        if op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)} (got {op!r})")
        if array.dtype.name not in DTYPES:
            raise TypeError(f"dtype must be one of {', '.join(DTYPES)} (got {array.dtype.name})")
        if op == "mean" and array.dtype.kind == "i":
            raise ValueError(f"the mean of integers is not an integer (got {array.dtype.name}); use op='sum'")
        if not array.flags.writeable:
            raise ValueError("array must be writable, for it holds the result")
        if not array.flags.c_contiguous:
            raise ValueError(f"array must be contiguous (got strides {array.strides})")
        return array.reshape(-1)


def connect(
    rank: int,
    nranks: int,
    rendezvous: str = "127.0.0.1:8600",
    backend: str = "auto",
    *,
    timeout: float = 30.0,
) -> Group:
    """Join the group of `nranks` ranks that meets at `rendezvous`, where rank 0 listens; blocks until all have.

    Args:
        rendezvous: HOST:PORT, or unix-abstract:NAME for ranks of one host.
        backend: "shm" (one host), "tcp" (any), or "auto": shm if the rendezvous is on this host, else tcp.
        timeout: deadline of every wait, in seconds.

    Raises:
        RendezvousError, VersionMismatch, PeerUnreachable, PortInUse: the group did not come together.
    """
    check_rank(rank, nranks)
    choose("backend", backend, BACKENDS)
    host = rendezvous.rpartition(":")[0].strip("[]")
    local = rendezvous.startswith("unix") or host in ("127.0.0.1", "localhost", "::1")
    kind = backend if backend != "auto" else ("shm" if local else "tcp")
    if kind == "shm" and not local:
        raise UsageError(f"backend shm needs all ranks on one host, the rendezvous is at {host}; use tcp")
    if nranks == 1:
        return Group(make_memory_ring(1)[0], backend=kind)
    with ExitStack() as until_connected:
        if rank == 0:
            server = until_connected.enter_context(RendezvousServer(rendezvous, nranks, timeout=timeout))
            rendezvous = server.address
        listening_host = "" if kind == "shm" else "127.0.0.1" if local else own_host(host)
        listener = until_connected.enter_context(Listener(listening_host, f"gradsync-{secrets.token_hex(8)}"))
        members = join(rendezvous, rank=rank, nranks=nranks, backend=kind, address=listener.address, timeout=timeout)
        mesh, to_right, from_left = build_mesh(
            rank, members.addresses, listener, members.token, ring=kind == "tcp", timeout=timeout
        )
    if to_right is None or from_left is None:
        return Group(ShmTransport(mesh, nranks), backend=kind)
    return Group(TcpTransport(mesh, nranks, to_right, from_left), backend=kind)
