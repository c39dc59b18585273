"""The door for NumPy arrays: one array of parameters, its gradients, and the servers between the trainers."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import UsageError
from common.system.addresses import parse_addresses
from common.tensors.arena import Arena, FloatArray, Layout, Slot
from common.tensors.buckets import Bucket, align, words
from common.tensors.copying import copy
from common.tensors.optimizers import Optimizer
from ps.client.client import Client

__all__ = ["Connection", "connect"]

Array = npt.NDArray[Any]


class Connection:
    """One trainer's membership in a group. Every method is called by all trainers in the same order, from one thread.

    A context manager: leaving it closes it; after an exception the other trainers learn the reason.

    Raises (every operation that waits):
        PeerLost, PeerStalled: a trainer or server died, failed or did not take part within the timeout; it is named.
        LayoutMismatch, ProtocolError: the trainers' calls do not match.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.rank, self.nranks = client.rank, client.nranks
        self._parameters: Array | None = None  # the caller's
        self._optimizer: Optimizer | None = None
        self._arena: Arena | None = None
        self._pushed = False  # and not pulled
        self._staging: FloatArray | None = None  # for gradients that are not from `empty`
        self._made: dict[
            int, tuple[int, FloatArray]
        ] = {}  # by address: bytes of what `empty` gave, and the same padded

    @property
    def step(self) -> int:
        """How many steps have ended."""
        return self._client.step

    @property
    def data_plane(self) -> str:
        """What carries the data, from `register` on: "shm", "tcp", "grpc", or several, as in "tcp+shm"."""
        return self._client.data_plane

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32") -> Array:
        """A new array of zeros that servers of this host reach without a copy (any other array works too)."""
        kind, size = np.dtype(dtype), int(np.prod(shape))
        word = words(kind.name)
        flat: FloatArray = self._client.empty(align(size * word))
        self._made[flat.ctypes.data] = size * kind.itemsize, flat
        return flat.view(kind)[:size].reshape(shape)

    def register(self, parameters: Array, optimizer: Optimizer | None = None) -> None:
        """Agree on what is synchronised; on every trainer `parameters` becomes rank 0's.

        Args:
            parameters: float32, or float64 without an optimizer; contiguous, of equal shape on all trainers. An array
                from `empty` may become memory common to the trainers of this host, which only servers may write to
                until the connection is closed. Without an optimizer it is only read here.
            optimizer: `ps.SGD(learning_rate=0.1)` and its like, applied by the servers to the mean of the gradients;
                None: `pull` gives that mean.

        Raises:
            TypeError, ValueError: the array is not of that kind.
        """
        if self._arena is not None:
            raise UsageError("register was called before; one connection synchronises one array")
        check(parameters, "parameters", ("float32",) if optimizer else ("float32", "float64"))
        word = words(parameters.dtype.name)
        length = align(parameters.size * word)
        layout = Layout((Slot("parameters", parameters.shape, 0, parameters.dtype.name),), length)
        buckets = (Bucket(0, length, parameters.dtype.name),) if length else ()
        self._parameters, self._optimizer = parameters, optimizer
        flat = self._padded(parameters)
        whole = self._client.empty(length) if flat is None else flat
        self._arena = Arena(layout, buckets=buckets, given=(whole, np.zeros(length, np.float32)))
        if flat is None:
            self._view(whole)[...] = parameters
        self._client.register(self._arena, optimizer)
        if flat is None:
            parameters[...] = self._view(whole)

    def push(self, gradients: Array) -> None:
        """Hand this trainer's gradients over; they must stay as they are until `pull` has returned.

        Args:
            gradients: of the parameters' shape and dtype, contiguous. Arrays from `empty` are read where they are.
        """
        self._take(gradients)
        self._push_all()

    def pull(self, out: Array | None = None, *, learning_rate: float | None = None) -> None:
        """End the step, once `push` was called: blocks until its result is there.

        Args:
            out: gets the new parameters, if it is another array than those registered, which get them anyway; without
                an optimizer, the mean of the gradients, and must be given.
            learning_rate: of this step; by default the optimizer's. All trainers' must be equal.
        """
        arena, parameters = self._registered(), self._parameters
        assert parameters is not None
        self._check_out(out)
        if self._optimizer is None:
            if out is None:
                raise UsageError("without an optimizer pull needs an array for the mean: pull(out=...)")
            self._end_push()
            self._client.average()
            if out.ctypes.data != self._client.gradients.ctypes.data:
                copy(out, self._view(self._client.gradients))
            return
        self._end_push()
        self._client.commit(self._optimizer.learning_rate if learning_rate is None else learning_rate)
        for array in (parameters, out):
            if array is not None and array.ctypes.data != arena.parameters.ctypes.data:
                copy(array, self._view(arena.parameters))

    def push_pull(self, gradients: Array, out: Array | None = None, *, learning_rate: float | None = None) -> None:
        """One synchronous step; without an optimizer the mean replaces `gradients` unless `out` is given.

        Between hosts new parameters come back while gradients are still being pushed, which takes less time than `push`
        and `pull` by themselves.
        """
        self._take(gradients)
        self._check_out(out)
        if self._optimizer is not None:
            learning_rate = self._optimizer.learning_rate if learning_rate is None else learning_rate
            self._client.commit_ahead(learning_rate)
        self._push_all()
        self.pull(gradients if out is None and self._optimizer is None else out, learning_rate=learning_rate)

    def all_gather(self, array: Array) -> Array:
        """Every trainer's `array` (equal shape and dtype), stacked in rank order; not between push and pull."""
        return self._client.all_gather(array)

    def barrier(self) -> None:
        """Block until every trainer has called it; not between push and pull."""
        self._client.all_gather(np.zeros(0))

    def close(self, reason: str = "") -> None:
        """Leave the group; idempotent."""
        self._client.close(reason)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close("" if kind is None else f"{kind.__name__}: {error}")

    def _take(self, gradients: Array) -> None:
        """They are what is pushed next."""
        arena = self._registered()
        if self._pushed:
            raise UsageError("gradients were pushed already; call pull() before the next ones")
        check(gradients, "gradients", (arena.layout.slots[0].dtype,), like=self._parameters)
        flat = self._padded(gradients)
        if flat is None:
            if self._staging is None:
                self._staging = self._client.empty(arena.layout.length)
            flat = self._staging
            copy(self._view(flat), gradients)
        self._client.gradients_in(flat)

    def _push_all(self) -> None:
        for bucket in range(len(self._registered().buckets)):
            self._client.push(bucket)
        self._pushed = True

    def _end_push(self) -> None:
        if not self._pushed:
            raise UsageError("pull was called without gradients to wait for; call push(gradients) first")
        self._pushed = False

    def _check_out(self, out: Array | None) -> None:
        if out is not None and self._parameters is not None:
            check(out, "out", (self._parameters.dtype.name,), like=self._parameters)

    def _registered(self) -> Arena:
        if self._arena is None:
            raise UsageError("call register(parameters, optimizer) first")
        return self._arena

    def _padded(self, array: Array) -> FloatArray | None:
        """The memory of an array from `empty` with the zeros behind it; None of any other, and of a part of one, behind
        which lies something else."""
        nbytes, flat = self._made.get(array.ctypes.data, (-1, None))
        return flat if nbytes == array.nbytes else None

    def _view(self, flat: FloatArray) -> Array:
        """The caller's elements of an array of the arena's length."""
        assert self._parameters is not None
        return flat.view(self._parameters.dtype)[: self._parameters.size].reshape(self._parameters.shape)


def connect(
    servers: Sequence[str] | str, rank: int, nranks: int, data_plane: str = "auto", *, timeout: float = 30.0
) -> Connection:
    """Join the group of `nranks` trainers of these servers; blocks until all have.

    Args:
        servers: HOST:PORT of every server, in the order of their --shard (`python -m ps.server --nranks N --port P`);
            also as one text, separated by commas.
        data_plane: "shm" (one host), "tcp", "grpc" (slower, through any proxy), or "auto": the first that can.
        timeout: deadline of every wait, in seconds.

    Raises:
        PeerUnreachable, RendezvousError, VersionMismatch, UsageError: the group did not come together.
    """
    if isinstance(servers, str):
        servers = parse_addresses(servers)
    return Connection(Client(servers, rank, nranks, timeout=timeout, data_plane=data_plane))


def check(array: Array, name: str, dtypes: Sequence[str], *, like: Array | None = None) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a numpy.ndarray (got {type(array).__name__})")
    if array.dtype.name not in dtypes or not array.dtype.isnative:
        raise TypeError(f"{name} must be {' or '.join(dtypes)} (got {array.dtype.str})")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ValueError(f"{name} must be contiguous and writable")
    if like is not None and array.shape != like.shape:
        raise ValueError(f"{name} must have the parameters' shape {like.shape} (got {array.shape})")
