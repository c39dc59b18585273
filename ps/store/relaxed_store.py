"""A server's state where trainers need not be at the same step: ssp, async and geo, each out of StepStates.

As there: no gRPC, no clock, no thread of its own, and whatever does not fit is refused and changes nothing. What is
read in a trainer's memory is copied from there as it becomes final, for its commit may be answered, and its memory be
written to, before that is applied.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common.errors import ProtocolError, StaleEpoch
from common.system.memory import aligned_empty
from common.tensors.arena import FloatArray
from common.tensors.buckets import Bucket
from common.tensors.optimizers import Optimizer
from common.tensors.updater import Updater, make_updater
from ps.store.ending import Ending
from ps.store.shards import Shard
from ps.store.step_state import StepState
from ps.store.store import NOTHING_NEW, Progress, Result, Store

__all__ = ["AsyncStore", "RelaxedStore", "SspStore"]

UpdaterMaker = Callable[["RelaxedStore", Optimizer | None], Updater]


def paddles_updater(store: RelaxedStore, optimizer: Optimizer | None) -> Updater:
    return make_updater(optimizer, store.parameters, store.gradients, helper=store.helper)


class RelaxedStore(Store):
    """The parameters of one shard, and what each trainer has sent of the step it is at.

    Args:
        staleness: how many steps a trainer may be ahead of the slowest; None: any number.
        make_updater: what turns `gradients` into new `parameters`.
        others: as of StepState.
    """

    def __init__(
        self,
        shard: Shard,
        buckets: Sequence[Bucket],
        nranks: int,
        *,
        staleness: int | None,
        epoch: int = 0,
        helper: ThreadPoolExecutor | None = None,
        make_updater: UpdaterMaker = paddles_updater,
    ) -> None:
        self.shard, self.nranks, self.staleness = shard, nranks, staleness
        self.buckets, self.helper = buckets, helper
        self.updates = 0  # how many the parameters have seen
        self._steps = [0] * nranks  # how many each trainer has committed
        self._waiting: set[int] = set()  # whose last commit is not answered
        self._parameters, self.gradients = aligned_empty(shard.length), aligned_empty(shard.length)
        self._epoch, self._make_updater = epoch, make_updater
        self._updater: Updater | None = None  # until `begin`
        self._elsewhere: dict[int, FloatArray] = {}  # where trainers have their gradients, to be copied from there
        self._made: list[StepState] = []

    @abstractmethod
    def _reduce(self, bucket: int) -> None:
        """Average a bucket that all trainers have delivered."""

    @abstractmethod
    def _state_of(self, rank: int) -> StepState:
        """What takes the trainer's present step."""

    @abstractmethod
    def _apply(self, state: StepState, updater: Updater) -> None:
        """All that this step waits for has been committed: update."""

    @property
    def parameters(self) -> FloatArray:
        return self._parameters

    @property
    def steps(self) -> Sequence[int]:
        return self._steps

    def keep_parameters_in(self, array: FloatArray) -> None:
        self._parameters = array
        for state in self._made:
            state.keep_parameters_in(array)

    def begin(self, optimizer: Optimizer | None) -> Sequence[Result]:
        self._updater = self._make_updater(self, optimizer)
        return [self._result(rank) for rank in range(self.nranks)]

    def read_in_place(self, rank: int, array: FloatArray) -> None:
        if rank not in self._elsewhere:
            for state in self._made:
                if rank in state.ranks:
                    state.read_in_place(rank, aligned_empty(self.shard.length))
        self._elsewhere[rank] = array

    def push(self, rank: int, epoch: int, step: int, bucket: int, start: int, data: FloatArray | int) -> Progress:
        self._check(rank, epoch, step)
        if isinstance(data, int) != (rank in self._elsewhere):
            raise ProtocolError(f"rank {rank} pushed words at step {step} where they are not expected")
        state = self._state_of(rank)
        complete = state.push(rank, epoch, step, bucket, start, data)
        if isinstance(data, int):
            words = slice(start - self.shard.start, start - self.shard.start + data)
            state.contributions.in_place(rank)[words] = self._elsewhere[rank][words]
        if complete:
            with self.trace.span("reduce", bucket, step=step):
                self._reduce(bucket)
        return NOTHING_NEW

    def commit(self, rank: int, epoch: int, step: int, ending: Ending, used: bytes, *, ahead: bool = False) -> Progress:
        """What is complete with that is applied; those who may go on get the parameters as they are."""
        self._check(rank, epoch, step)
        if self._updater is None:
            raise ProtocolError(f"rank {rank} committed step {step} before all had registered")
        if ahead or not ending.update or ending.again or ending.replaced:
            raise ProtocolError(f"rank {rank} asked for more than an update at step {step}, which only sync mode has")
        with self.trace.span("commit", step=step):
            state = self._state_of(rank)
            complete = state.commit(rank, epoch, step, ending, used)
            self._steps[rank] += 1
            self._waiting.add(rank)
            if complete:
                self._apply(state, self._updater)
                self.updates += 1
        return Progress(finished=True, results=[self._result(each) for each in self._release()])

    def _release(self) -> list[int]:
        """Those who may begin their next step wait no longer."""
        bound = self.staleness
        released = [r for r in sorted(self._waiting) if bound is None or self._steps[r] - bound <= self.updates]
        self._waiting.difference_update(released)
        return released

    def _result(self, rank: int) -> Result:
        return Result([rank], self._steps[rank], self.shard.start, self._parameters, lasting=False)

    def pull(self, rank: int, epoch: int, step: int) -> Result:
        self._check(rank, epoch, step)
        return self._result(rank)

    def _check(self, rank: int, epoch: int, step: int) -> None:
        """The trainer must have just begun, or be within, its step of that number."""
        if epoch != self._epoch:
            raise StaleEpoch(f"rank {rank} sent a message of epoch {epoch}, this is epoch {self._epoch}")
        if rank in self._waiting:
            raise ProtocolError(f"rank {rank} sent more before its commit of step {self._steps[rank] - 1} was answered")
        if step != self._steps[rank]:
            raise ProtocolError(f"rank {rank} sent step {step}, it is at step {self._steps[rank]}")

    def waiting(self) -> AbstractSet[int]:
        return self._waiting

    def waiting_for(self) -> list[int]:
        return [rank for rank, steps in enumerate(self._steps) if steps == self.updates] if self._waiting else []

    def misses(self, gone: AbstractSet[int]) -> bool:
        return self.staleness is not None and any(self._steps[rank] < max(self._steps) for rank in gone)

    def _make(self, step: int, ranks: Sequence[int]) -> StepState:
        """One step of these trainers, on our parameters."""
        state = StepState(
            self.shard,
            self.buckets,
            self.nranks,
            epoch=self._epoch,
            helper=self.helper,
            ranks=ranks,
            gradients=self.gradients,
        )
        state.step = step
        state.keep_parameters_in(self._parameters)
        self._made.append(state)
        return state


class SspStore(RelaxedStore):
    """Step t is averaged as in sync once all trainers have committed it, and steps are applied in order.

    A trainer may begin step t when step t-1-s is applied, so contributions of s+1 steps are kept: step t's in state
    t mod (s+1). All may use one buffer for the average: when all have delivered a bucket of step t+1, all have
    committed step t, which is applied by then.
    """

    def __init__(self, *args: Any, staleness: int, **options: Any) -> None:
        super().__init__(*args, staleness=staleness, **options)
        self._window = [self._make(step, range(self.nranks)) for step in range(staleness + 1)]

    def _reduce(self, bucket: int) -> None:
        self._window[self.updates % len(self._window)].reduce(bucket)

    def _state_of(self, rank: int) -> StepState:
        return self._window[self._steps[rank] % len(self._window)]

    def _apply(self, state: StepState, updater: Updater) -> None:
        state.update(updater)
        state.step += len(self._window) - 1


class AsyncStore(RelaxedStore):
    """Every trainer's step is applied when it commits it, and by itself; which of two is first is left to chance."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, staleness=None, **options)
        self._states = [self._make(0, [rank]) for rank in range(self.nranks)]

    def _reduce(self, bucket: int) -> None:
        """Nothing is averaged; a trainer's words are taken when it commits."""

    def _state_of(self, rank: int) -> StepState:
        return self._states[rank]

    def _apply(self, state: StepState, updater: Updater) -> None:
        for bucket in range(len(self.buckets)):
            state.reduce(bucket)  # of one: a copy
        state.update(updater)
