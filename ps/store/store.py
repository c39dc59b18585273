"""The one interface of a server's state, whatever the consistency mode: trainers push and commit, results come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from common.commit.slices import Slice
from common.sync.trace import NO_TRACE, Trace
from common.tensors.arena import FloatArray
from common.tensors.optimizers import Optimizer
from ps.store.ending import Ending
from ps.store.shards import Shard
from ps.store.update_for_program import UpdateByParameter

__all__ = ["NOTHING_NEW", "Progress", "Result", "Store"]


@dataclass(frozen=True)
class Result:
    """Words that some trainers have been waiting for.

    Args:
        ranks: these trainers.
        step: how many steps they have made with it.
        start: where in the arena the words begin.
        words: parameters or, if `averages`, averaged gradients.
        complete: nothing else of that step follows.
        lasting: the words stay until all these trainers have pushed and committed more; otherwise the next message of
            any trainer may change them.
    """

    ranks: Sequence[int]
    step: int
    start: int
    words: FloatArray
    averages: bool = False
    complete: bool = True
    lasting: bool = True


@dataclass(frozen=True)
class Progress:
    """What a trainer's message has brought about.

    Args:
        finished: the trainer has pushed and committed all of its step now.
        results: what there is with it to be handed out.
    """

    finished: bool
    results: Sequence[Result] = ()


NOTHING_NEW = Progress(finished=False)


class Store(ABC):
    """The parameters of one shard, and what trainers have sent that is not applied yet.

    What does not fit is refused with a StaleEpoch, a ProtocolError or a LayoutMismatch, and changes nothing. Steps are
    counted from 0, positions and sizes in words of 4 bytes from the arena's start.
    """

    shard: Shard
    trace: Trace = NO_TRACE

    @property
    @abstractmethod
    def parameters(self) -> FloatArray:
        """The shard's, as they are now."""

    @abstractmethod
    def begin(self, optimizer: Optimizer | None) -> Sequence[Result]:
        """All trainers are there, and `parameters` are rank 0's, which they are to get now.

        Raises:
            UsageError: the optimizer cannot be had here.
        """

    @property
    def program(self) -> UpdateByParameter | None:
        """Where trainers may name the optimizer later."""
        return None

    def optimizer_slice(self) -> Slice:
        """Copies of what the optimizer that was there from the beginning keeps; between steps, in sync mode."""
        return Slice(self.shard.start, self.shard.stop, {})

    def load_optimizer(self, slices: Sequence[Slice]) -> None:  # noqa: B027 - of what keeps nothing
        """Have it go on from what such slices make up; after `begin`, before the first step.

        Raises:
            ValueError: they do not cover the shard.
            UsageError: they are another optimizer's.
        """

    @abstractmethod
    def keep_parameters_in(self, array: FloatArray) -> None:
        """Before anything else is done with them: `parameters` are to lie in this memory."""

    @abstractmethod
    def read_in_place(self, rank: int, array: FloatArray) -> None:
        """A trainer's gradients of the shard lie in this memory, from now on: it only pushes how many are there."""

    @abstractmethod
    def push(self, rank: int, epoch: int, step: int, bucket: int, start: int, data: FloatArray | int) -> Progress:
        """Take gradients of one trainer, in ascending order within a bucket.

        Args:
            data: the words, which must not change; or how many, of a trainer whose gradients are read in place.
        """

    @abstractmethod
    def commit(self, rank: int, epoch: int, step: int, ending: Ending, used: bytes, *, ahead: bool = False) -> Progress:
        """A trainer has pushed all of its step.

        Args:
            used: a byte for each parameter, not zero if this trainer's backward reached it; empty: it reached all.
            ahead: the rest of its pushes follows.
        """

    @abstractmethod
    def pull(self, rank: int, epoch: int, step: int) -> Result:
        """The parameters as they are now, for a trainer that is between two steps; not in sync mode."""

    @property
    @abstractmethod
    def steps(self) -> Sequence[int]:
        """How many steps each trainer has made; an average and the update by it that follows are one."""

    @abstractmethod
    def waiting(self) -> AbstractSet[int]:
        """The trainers that wait for others."""

    @abstractmethod
    def waiting_for(self) -> list[int]:
        """The trainers that those wait for."""

    @abstractmethod
    def misses(self, gone: AbstractSet[int]) -> bool:
        """Whether something has begun that cannot end without trainers that have left."""

    def within_step(self) -> bool:
        """Whether a step has begun that others must end."""
        return False
