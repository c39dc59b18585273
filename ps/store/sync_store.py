"""A server's state where all trainers take each step together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from common.commit.slices import Slice, cut
from common.errors import ProtocolError
from common.system.memory import aligned_empty
from common.tensors.arena import FloatArray
from common.tensors.buckets import Bucket
from common.tensors.optimizers import Optimizer
from common.tensors.updater import make_piece_updater
from ps.store.contributions import WHOLE
from ps.store.ending import Ending
from ps.store.shards import Shard
from ps.store.step_state import StepState
from ps.store.store import NOTHING_NEW, Progress, Result, Store
from ps.store.update_for_built_in import UpdateInPieces
from ps.store.update_for_program import UpdateByParameter

__all__ = ["SyncStore"]


class SyncStore(Store):
    """One step at a time. With an optimizer from the beginning, what all trainers have pushed and committed ahead is
    updated and handed out piece by piece; otherwise at the end of the step.

    Args:
        piece: words that are averaged and updated at a time.
        others: as of StepState.
    """

    def __init__(
        self,
        shard: Shard,
        buckets: Sequence[Bucket],
        nranks: int,
        *,
        epoch: int,
        empty: Callable[[int], FloatArray] = aligned_empty,
        piece: int = WHOLE,
        helper: ThreadPoolExecutor | None = None,
    ) -> None:
        self.shard, self._ranks, self._helper = shard, range(nranks), helper
        self._step = StepState(shard, buckets, nranks, epoch=epoch, empty=empty, piece=piece, helper=helper)
        self._in_pieces: UpdateInPieces | None = None  # the update, with an optimizer from the beginning; or else
        self._program = UpdateByParameter(self._step)

    @property
    def parameters(self) -> FloatArray:
        return self._step.parameters

    @property
    def steps(self) -> Sequence[int]:
        return [self._step.step - self._step.used_again] * len(self._ranks)

    @property
    def program(self) -> UpdateByParameter:
        return self._program

    def keep_parameters_in(self, array: FloatArray) -> None:
        self._step.keep_parameters_in(array)

    def begin(self, optimizer: Optimizer | None) -> Sequence[Result]:
        if optimizer is not None:  # all that trainers can name work element by element
            contributions = self._step.contributions
            by_piece = make_piece_updater(optimizer, self.parameters, contributions.pieces())
            self._in_pieces = UpdateInPieces(contributions, by_piece, helper=self._helper)
        return [self._result(self.shard.start, self.parameters, self._step.step)]

    def optimizer_slice(self) -> Slice:
        arrays = self._in_pieces.optimizer.arrays() if self._in_pieces else {}
        return Slice(self.shard.start, self.shard.stop, arrays)

    def load_optimizer(self, slices: Sequence[Slice]) -> None:
        if self._in_pieces:
            self._in_pieces.optimizer.load(cut(slices, self.shard.start, self.shard.stop).arrays)

    def read_in_place(self, rank: int, array: FloatArray) -> None:
        self._step.read_in_place(rank, array)

    def push(self, rank: int, epoch: int, step: int, bucket: int, start: int, data: FloatArray | int) -> Progress:
        complete = self._step.push(rank, epoch, step, bucket, start, data)
        # committed by all: averaged as it is updated, in the cache, for nobody needs to wait with that
        if complete and not (self._in_pieces and self._step.committed):
            with self.trace.span("reduce", bucket, step=step):
                self._step.reduce(bucket)
        finished = self._step.has_finished(rank)
        return self._go_on(finished=finished) if complete or finished else NOTHING_NEW

    def commit(self, rank: int, epoch: int, step: int, ending: Ending, used: bytes, *, ahead: bool = False) -> Progress:
        self._step.commit(rank, epoch, step, ending, used, ahead=ahead)
        return self._go_on(finished=self._step.has_finished(rank))

    def _go_on(self, *, finished: bool) -> Progress:
        """What can be done now is done."""
        if not self._step.is_due(in_pieces=self._in_pieces is not None):
            return Progress(finished)
        if not self._step.ending.update:
            return Progress(finished, [self._average()])
        with self.trace.span("update", step=self._step.step):
            if self._in_pieces:
                return Progress(finished, self._update_pieces(self._in_pieces))
            return Progress(finished, [self._update_whole()])

    def _average(self) -> Result:
        self._step.average()
        return self._result(self.shard.start, self._step.gradients, self._step.step, averages=True)

    def _update_whole(self) -> Result:
        self._program.apply()
        return self._result(self.shard.start, self.parameters, self._step.step)

    def _update_pieces(self, in_pieces: UpdateInPieces) -> list[Result]:
        """Average and update what is there; with the last of it the step ends."""
        step, base = self._step.step, self.shard.start
        with ExitStack() as averaging:
            for bucket in self._step.averaged_with_the_update():
                averaging.enter_context(self.trace.span("reduce", bucket, step=step))
            runs = self._step.update_pieces(in_pieces)
        ended = self._step.step > step
        results = [
            self._result(start, self.parameters[start - base : stop - base], step + 1, complete=False)
            for start, stop in runs
        ]
        return [*results, self._result(base, self.parameters[:0], step + 1)] if ended else results

    def _result(
        self, start: int, words: FloatArray, step: int, *, averages: bool = False, complete: bool = True
    ) -> Result:
        return Result(self._ranks, step, start, words, averages=averages, complete=complete)

    def pull(self, rank: int, epoch: int, step: int) -> Result:  # noqa: ARG002 - there is none of it
        raise ProtocolError(f"rank {rank} asked for parameters at step {step}, which come unasked in sync mode")

    def waiting(self) -> AbstractSet[int]:
        return {rank for rank in self._ranks if self._step.has_finished(rank)}

    def waiting_for(self) -> list[int]:
        return self._step.waiting_for()

    def misses(self, gone: AbstractSet[int]) -> bool:
        return bool(gone) and self._step.begun

    def within_step(self) -> bool:
        return self._step.begun
