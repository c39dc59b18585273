"""What NCCL does to arrays on the GPU: by its own algorithms, or by our ring on its sends and receives.

    nccl   ncclAllReduce and the like: NCCL chooses the algorithm and with it the order of summation, so its sums equal
           the other backends' only within a bound (docs/gpu.md)
    ring   the schedule of collective/algorithms/schedule.py, with ncclSend, ncclRecv and CuPy's additions: the
           canonical order, and so the same bits as every other backend of ours

Floating-point maxima: NCCL's may lose a NaN, so NaNs travel apart, in a sum. float16 is summed as float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from collective.algorithms.schedule import all_gather_steps, reduce_scatter_steps
from collective.nccl.binding import NcclBinding
from collective.nccl.cuda import Gpu
from common.tensors.buckets import chunk_bounds
from common.tensors.reduction import Reduction

__all__ = ["OwnReductions", "Reductions", "RingReductions", "Scratch"]


class Scratch:
    """GPU memory that is kept from call to call, a piece for each use."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._kept: dict[str, Any] = {}  # bytes

    def of(self, use: str, count: int, dtype: npt.DTypeLike) -> Any:
        """An uninitialised array; what this use had there before may still be read on our stream, in order."""
        nbytes = count * np.dtype(dtype).itemsize
        kept = self._kept.get(use)
        if kept is None or kept.size < nbytes:
            kept = self._kept[use] = self._gpu.empty(nbytes, np.uint8)
        return kept[:nbytes].view(dtype)


class Reductions(ABC):
    """Arrays are on the GPU, and every method runs within its context: work goes on our stream, nothing waits."""

    name: str

    def __init__(self, binding: NcclBinding, gpu: Gpu, scratch: Scratch, rank: int, nranks: int) -> None:
        self._nccl, self._gpu, self._scratch = binding, gpu, scratch
        self._rank, self._nranks = rank, nranks

    @abstractmethod
    def all_reduce(self, array: Any, reduction: Reduction) -> None:
        """Replace the array, on every rank, by the reduction over ranks."""

    @abstractmethod
    def reduce_scatter(self, array: Any, reduction: Reduction) -> None:
        """Replace this rank's chunk by its reduction; spoil the rest."""

    @abstractmethod
    def gather_chunks(self, array: Any) -> None:
        """Replace each chunk, on every rank, by that of the rank of the same number."""

    def gather_rows(self, rows: Any) -> None:
        """Fill the `nranks` equal parts, of which this rank has written its own."""
        each = rows.size // self._nranks
        self._nccl.all_gather(rows[self._rank * each : (self._rank + 1) * each], rows, self._gpu.stream.ptr)

    def _scale(self, part: Any, reduction: Reduction) -> None:
        if reduction.scale is not None and part.size:
            self._gpu.xp.multiply(part, reduction.scale[()], out=part)


class OwnReductions(Reductions):
    """NCCL's."""

    name = "nccl"

    def all_reduce(self, array: Any, reduction: Reduction) -> None:
        work = array.astype(reduction.partial) if reduction.widens else array
        self._combine_all(work, reduction)
        self._scale(work, reduction)
        if work is not array:
            array[...] = work

    def reduce_scatter(self, array: Any, reduction: Reduction) -> None:
        if reduction.combine is not np.add or reduction.widens:
            self.all_reduce(array, reduction)
            return
        stream, bounds = self._gpu.stream.ptr, chunk_bounds(array.size, self._nranks)
        mine = array[slice(*bounds[self._rank])]
        if equally_long(bounds):
            self._nccl.reduce_scatter(array, mine, "sum", stream)
        else:
            with self._nccl.grouped():
                for root, (start, stop) in enumerate(bounds):
                    self._nccl.reduce(array[start:stop], "sum", root, stream)
        self._scale(mine, reduction)

    def gather_chunks(self, array: Any) -> None:
        stream, bounds = self._gpu.stream.ptr, chunk_bounds(array.size, self._nranks)
        if equally_long(bounds):
            self._nccl.all_gather(array[slice(*bounds[self._rank])], array, stream)
            return
        with self._nccl.grouped():
            for root, (start, stop) in enumerate(bounds):
                self._nccl.broadcast(array[start:stop], root, stream)

    def _combine_all(self, work: Any, reduction: Reduction) -> None:
        stream, xp = self._gpu.stream.ptr, self._gpu.xp
        if reduction.combine is np.add:
            self._nccl.all_reduce(work, "sum", stream)
        elif work.dtype.kind == "i":
            self._nccl.all_reduce(work, "max", stream)
        else:
            nans = xp.where(xp.isnan(work), work, xp.zeros_like(work))
            self._nccl.all_reduce(work, "max", stream)
            self._nccl.all_reduce(nans, "sum", stream)
            work[...] = xp.where(xp.isnan(nans), nans, work)


class RingReductions(Reductions):
    """What is combined, and by whom, is as in RingAlgorithm; NCCL only carries chunks to the neighbour."""

    name = "ring"

    def all_reduce(self, array: Any, reduction: Reduction) -> None:
        self.reduce_scatter(array, reduction)
        self.gather_chunks(array)

    def reduce_scatter(self, array: Any, reduction: Reduction) -> None:
        partial = array.astype(reduction.partial) if reduction.widens else array
        bounds = chunk_bounds(array.size, self._nranks)
        inbox = self._scratch.of("inbox", max(stop - start for start, stop in bounds), reduction.partial)
        combine = getattr(self._gpu.xp, reduction.combine.__name__)
        mine = slice(*bounds[self._rank])
        for send, receive in reduce_scatter_steps(self._rank, self._nranks):
            own = partial[slice(*bounds[receive])]
            arrived = inbox[: own.size]
            self._pass_on(partial[slice(*bounds[send])], arrived)
            if own.size:
                combine(arrived, own, out=own)
        self._scale(partial[mine], reduction)
        if partial is not array:
            array[mine] = partial[mine]

    def gather_chunks(self, array: Any) -> None:
        bounds = chunk_bounds(array.size, self._nranks)
        for send, receive in all_gather_steps(self._rank, self._nranks):
            self._pass_on(array[slice(*bounds[send])], array[slice(*bounds[receive])])

    def _pass_on(self, leaving: Any, arriving: Any) -> None:
        stream = self._gpu.stream.ptr
        with self._nccl.grouped():
            if leaving.size:
                self._nccl.send(leaving, (self._rank + 1) % self._nranks, stream)
            if arriving.size:
                self._nccl.recv(arriving, (self._rank - 1) % self._nranks, stream)


def equally_long(bounds: Sequence[tuple[int, int]]) -> bool:
    return len({stop - start for start, stop in bounds}) == 1
