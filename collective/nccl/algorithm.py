"""The calls of a group over NCCL: what it does (reductions.py) is put on a stream, and waited for beside the mesh.

Data never passes the mesh, but beside each call a note does: what this rank is about to do, told to the right neighbour
and compared by it. The mesh is also how a rank that waits for its GPU learns that another one has died.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from collective.algorithm import Algorithm
from collective.call_tags import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    GATHER_CHUNKS,
    OPERATIONS,
    REDUCE_SCATTER,
    Array,
    Label,
    Tag,
)
from collective.membership.liveness import Mesh
from collective.nccl.binding import NcclBinding
from collective.nccl.cuda import Gpu
from collective.nccl.reductions import OwnReductions, Reductions, RingReductions, Scratch
from collective.nccl.stuck_calls import Watchdog, end_process
from common.errors import GradSyncError, NcclFailed, PeerError
from common.tensors.reduction import Reduction

__all__ = ["NcclAlgorithm"]

SLICE_S = 0.05  # a rank that waits for its GPU looks this often whether somebody died
SPIN_S = 0.001  # it asks the GPU without a pause for so long, and then with pauses of
PAUSE_S = 0.0001
EXPLAIN_S = 1.0  # an error of NCCL's may be another rank's death, of which the mesh knows a moment later
END_S = 5.0  # for abort and destroy, which can hang
Note = list[int]  # the fields of a Tag, with the root in place of a chunk; bytes


class NcclAlgorithm(Algorithm):
    """Each call runs on our stream, after the caller's; the calling thread waits for its end.

    Host arrays (NumPy) are copied to the GPU and back, through pinned memory.

    Args:
        ring: reduce in the canonical order by our ring, instead of by NCCL's own algorithms.
        on_host: `empty` gives pinned host arrays, for those who compute on the CPU, instead of arrays on the GPU.
        end: what the watchdog does with an error while this process is stuck in NCCL.

    Raises:
        PeerLost, PeerStalled, NcclFailed: the group did not come together within the mesh's timeout.
    """

    def __init__(
        self,
        binding: NcclBinding,
        gpu: Gpu,
        mesh: Mesh,
        nranks: int,
        unique_id: bytes,
        *,
        ring: bool = False,
        on_host: bool = False,
        end: Callable[[GradSyncError], None] = end_process,
    ) -> None:
        self.rank, self.nranks = mesh.rank, nranks
        self._right, self._left = (self.rank + 1) % nranks, (self.rank - 1) % nranks
        self._nccl, self._gpu, self._mesh = binding, gpu, mesh
        self._on_host, self._end = on_host, end
        self._expected: Note = []  # what the left neighbour must tell; empty once it has
        self._failure: GradSyncError | None = None
        self._leaving = self._closed = False
        self._scratch = Scratch(gpu)
        kind = RingReductions if ring else OwnReductions
        self._reductions: Reductions = kind(binding, gpu, self._scratch, self.rank, nranks)
        self.name = self._reductions.name
        self._host_scratch: Array = np.empty(0, np.uint8)
        self._watchdog = Watchdog(self._look, self._end_this)
        try:
            with self._watchdog.over("initialisation"), gpu:
                binding.init(nranks, unique_id, self.rank)
        except GradSyncError as exc:
            error = self._give_up(exc)
            self.close(f"{type(error).__name__}: {error}")
            raise error from exc

    # What a caller's array is

    def empty(self, count: int, dtype: npt.DTypeLike) -> Array:
        made: Array = self._gpu.pinned(count, dtype) if self._on_host else self._gpu.empty(count, dtype)
        return made

    def view(self, array: Any) -> Array:
        if isinstance(array, np.ndarray) and not self._gpu.holds(array):
            return array
        adopted: Array = self._gpu.adopt(array)
        return adopted

    def restore(self, flat: Array, array: Array) -> None:
        if not self._gpu.holds(array):
            super().restore(flat, array)
            return
        with self._gpu:
            super().restore(flat, array)
            self._gpu.mark()
        self._wait(self._gpu.done, "copying")

    # The operations

    def all_reduce(self, flat: Array, reduction: Reduction, label: Label) -> None:
        phase = ALL_REDUCE + OPERATIONS * reduction.number
        self._carry_out("all_reduce", flat, label, phase, lambda array: self._reductions.all_reduce(array, reduction))

    def reduce_scatter(self, flat: Array, reduction: Reduction, label: Label) -> None:
        phase = REDUCE_SCATTER + OPERATIONS * reduction.number
        self._carry_out(
            "reduce_scatter", flat, label, phase, lambda array: self._reductions.reduce_scatter(array, reduction)
        )

    def all_gather(self, rows: Array, label: Label) -> None:
        phase = ALL_GATHER + OPERATIONS * rows.dtype.num
        self._carry_out("all_gather", rows.reshape(-1).view(np.uint8), label, phase, self._reductions.gather_rows)

    def gather_chunks(self, flat: Array, label: Label) -> None:
        phase = GATHER_CHUNKS + OPERATIONS * flat.dtype.num
        self._carry_out("gather_chunks", flat, label, phase, self._reductions.gather_chunks)

    def broadcast(self, flat: Array, root: int, label: Label) -> None:
        phase = BROADCAST + OPERATIONS * flat.dtype.num
        stream = self._gpu.stream.ptr
        self._carry_out(
            "broadcast", flat, label, phase, lambda array: self._nccl.broadcast(array, root, stream), root=root
        )

    def barrier(self, label: Label) -> None:
        token = self._scratch.of("barrier", 1, np.int32)
        stream = self._gpu.stream.ptr
        self._carry_out("barrier", token, label, BARRIER, lambda array: self._nccl.all_reduce(array, "max", stream))

    def close(self, reason: str = "") -> None:
        if self._closed:
            return
        self._closed = True
        self._mesh.close(reason)
        self._leave_nccl(self._nccl.abort if reason else self._nccl.destroy)
        self._watchdog.close()

    # How an operation goes

    def _carry_out(
        self, name: str, flat: Array, label: Label, phase: int, work: Callable[[Any], None], root: int = 0
    ) -> None:
        """Tell the neighbour, put the work on our stream, wait for the GPU, and hear what the neighbour was doing."""
        if self._failure:
            raise self._failure
        mine: Note = [*label, phase, root, 0, flat.nbytes]
        if self.nranks > 1:
            self._mesh.tell(self._right, mine)
            self._expected = mine
        try:
            if flat.size:
                self._gpu.follow_caller()
                with self._watchdog.over(name), self._gpu:
                    if self._gpu.holds(flat):
                        work(flat)
                        copies: list[Array] = []
                    else:
                        copies = self._through_pinned_memory(flat, work)
                    self._gpu.mark()
                self._wait(lambda: self._hears() and self._gpu.done(), name)  # the note comes while the GPU works
                for copy in copies:
                    np.copyto(flat, copy)
            else:
                self._wait(self._hears, name)
        except (GradSyncError, KeyboardInterrupt) as exc:
            raise self._give_up(exc) from exc

    def _through_pinned_memory(self, flat: Array, work: Callable[[Any], None]) -> list[Array]:
        """Work on a copy of a host array on the GPU; returns where the result will be, if not in the array itself."""
        pinned, direct = flat, self._gpu.is_pinned(flat)
        if not direct:
            if self._host_scratch.nbytes < flat.nbytes:
                self._host_scratch = self._gpu.pinned(flat.nbytes, np.uint8)
            pinned = self._host_scratch[: flat.nbytes].view(flat.dtype)
            np.copyto(pinned, flat)
        array = self._scratch.of("staging", flat.size, flat.dtype)
        self._gpu.upload(pinned, array)
        work(array)
        self._gpu.download(array, pinned)
        return [] if direct else [pinned]

    # Waiting, and what can go wrong

    def _wait(self, done: Callable[[], bool], doing: str) -> None:
        """Block until `done`; at most the timeout."""
        begin = looked = time.monotonic()
        while not done():
            now = time.monotonic()
            if now - looked > SLICE_S:
                looked = now
                self._look(doing, now - begin)
                self._nccl.check()
            if now - begin > SPIN_S:
                time.sleep(PAUSE_S)

    def _look(self, doing: str, waited: float) -> None:
        """Raise if the group cannot go on; the watchdog calls it while this rank's own thread is inside NCCL."""
        if self._leaving:
            if waited > END_S:
                raise self._failure or NcclFailed(f"rank {self.rank} could not leave NCCL within {END_S:g} s")
            return
        self._hears()
        self._mesh.check()
        gone = [rank for rank in range(self._mesh.nranks) if rank != self.rank and self._mesh.has_left(rank)]
        if gone and waited > EXPLAIN_S:  # one that left after its part was done is missed by nobody
            self._mesh.check(gone[0], f"in {doing}")
        if self._mesh.wait_on(self._left if self._expected else None, f"in {doing}", time.monotonic() - waited):
            raise NcclFailed(
                f"NCCL did not finish {doing} within {self._mesh.timeout:g} s although every rank waits for it "
                f"(this is rank {self.rank}, GPU {self._gpu.index}); NCCL_DEBUG=INFO makes it say more"
            )

    def _hears(self) -> bool:
        """Whether the left neighbour has told what it is doing, which is then compared."""
        if self._expected:
            theirs = self._mesh.told(self._left)
            if theirs is None:
                return False
            mine, self._expected = self._expected, []
            compare(mine, theirs, self._left)
        return True

    def _give_up(self, exc: BaseException) -> BaseException:
        """Abort what is under way; returns the error, or the other rank's death that explains it."""
        error = self._explained(exc) if isinstance(exc, NcclFailed) else exc
        self._failure = error if isinstance(error, GradSyncError) else NcclFailed(f"interrupted: {error!r}")
        self._leave_nccl(self._nccl.abort)
        return error

    def _explained(self, error: NcclFailed) -> GradSyncError:
        deadline = time.monotonic() + EXPLAIN_S
        while self.nranks > 1 and time.monotonic() < deadline:
            try:
                self._mesh.check()
            except PeerError as exc:
                return exc
            time.sleep(SLICE_S)
        return error

    def _leave_nccl(self, leave: Callable[[], None]) -> None:
        self._leaving = True
        with suppress(NcclFailed), self._watchdog.over("leaving NCCL"), self._gpu:  # it is as gone as it will be
            leave()

    def _end_this(self, error: GradSyncError) -> None:
        if not self._closed:
            self._mesh.close(f"{type(error).__name__}: {error}")
        self._end(error)


def compare(mine: Note, theirs: Note, rank: int) -> None:
    """Raise StaleEpoch or ProtocolError if `rank` is doing something else."""
    *what, nbytes = mine
    *other, their_bytes = theirs
    tag = Tag(*what)
    tag.check(Tag(*other), rank)
    tag.check_size(their_bytes, nbytes, rank)
