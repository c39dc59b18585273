"""One shard's parameters and the step under way as a state machine: it knows no gRPC and no clock.

It starts no thread, but lets a helper that it may be given take half of what is large to add up or to update.

A step goes through three stages, in this order, whatever the order in which trainers are heard:

    push    every trainer delivers every word of the shard, bucket by bucket, exactly once
    reduce  what all trainers have delivered is averaged, by pieces, in the order of common/tensors/canonical_order.py
    commit  once all trainers have committed, the optimizer updates the shard, and the next step begins

A trainer that knows how its step will end may commit it ahead of its pushes. Once all trainers have committed, each
piece can be averaged and updated as soon as all have delivered it, while the others are still on their way; until the
last one the shard is partly old and partly new.

Trainers may also agree to end a step with the average alone; a commit of the next step may then use that average
instead of new gradients. Whatever does not fit (an old epoch, another step, a word twice, a commit with pushes
missing) is refused with an error and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from common.errors import LayoutMismatch, ProtocolError, StaleEpoch
from common.system.memory import aligned_empty
from common.tensors.arena import FloatArray
from common.tensors.buckets import Bucket
from common.tensors.parts import PADDING
from common.tensors.updater import Updater
from ps.store.contributions import WHOLE, Contributions
from ps.store.ending import Ending
from ps.store.shards import Shard
from ps.store.update_for_built_in import UpdateInPieces

__all__ = ["StepState"]


class StepState:
    """The parameters of one shard, and the gradients of the step under way.

    Args:
        shard: the slice of the arena; every `start` below counts from the arena's start, not the slice's.
        buckets: the whole arena's bucket plan.
        empty: makes its arrays.
        helper: a thread on which half of a large bucket is reduced.
        ranks: the trainers that take part, if not all `nranks`.
        piece: words, a multiple of ALIGNMENT: buckets are cut into pieces of so many; by default not at all.
        gradients: where averages are to lie (not padded); by default in memory of its own.

    All positions and sizes are in words of 4 bytes.

    Memory: the shard's parameters, and its `contributions`.
    """

    def __init__(
        self,
        shard: Shard,
        buckets: Sequence[Bucket],
        nranks: int,
        *,
        epoch: int = 0,
        empty: Callable[[int], FloatArray] = aligned_empty,
        helper: ThreadPoolExecutor | None = None,
        ranks: Sequence[int] | None = None,
        piece: int = WHOLE,
        gradients: FloatArray | None = None,
    ) -> None:
        self.shard, self.nranks, self.epoch = shard, nranks, epoch
        self.ranks = range(nranks) if ranks is None else ranks
        self.buckets, self.step = buckets, 0
        self._empty = empty
        self.contributions = Contributions(
            shard, buckets, self.ranks, piece=piece, empty=empty, gradients=gradients, helper=helper
        )
        self._replacement: FloatArray | None = None  # parameters that rank 0 has sent, used from the next update on
        self._has_average = False  # of the step before, not used yet
        self.used_again = 0  # how many steps went on with the average of the one before, which were one to the program
        self._begin_step()

    def _begin_step(self) -> None:
        self.contributions.begin_step()
        self._updated = [0] * len(self.contributions.parts)  # words of each bucket's part, by an update in pieces
        self._committed: dict[int, Ending] = {}
        self._ahead: set[int] = set()  # who has committed ahead
        self._used = b""  # which parameters some trainer's backward has reached
        self._replaced = 0  # words of the replacement that have arrived

    @cached_property
    def padded_parameters(self) -> FloatArray:
        """The shard's parameters, and PADDING zeros."""
        array = self._empty(self.shard.length + PADDING)
        array.fill(0)
        return array

    @cached_property
    def parameters(self) -> FloatArray:
        """The shard's parameters."""
        return self.padded_parameters[: self.shard.length]

    @property
    def gradients(self) -> FloatArray:
        """Where the averaged gradients of the shard are found once all buckets are reduced; they may be read until all
        trainers have pushed a piece of the next step."""
        return self.contributions.gradients

    def keep_parameters_in(self, array: FloatArray) -> None:
        """Before anything else is done with them: the shard's parameters are to lie in this memory (not padded)."""
        self.parameters = array

    def read_in_place(self, rank: int, array: FloatArray) -> None:
        """A trainer's gradients of the shard lie in this memory, from now on: it only pushes how many are there.

        Raises:
            ProtocolError: it has pushed words of this step.
        """
        self.contributions.read_in_place(rank, self.step, array)

    def push(self, rank: int, epoch: int, step: int, bucket: int, start: int, data: FloatArray | int) -> bool:
        """Take gradients of one trainer, in ascending order within a bucket.

        Args:
            data: the words, whole elements, which are kept until they are averaged and must not change before; or how
                many, of a trainer whose gradients are read in place.

        Returns:
            True if with this all trainers have delivered another piece of the bucket, or the whole: the caller then
            calls `reduce`.

        Raises:
            StaleEpoch, ProtocolError: refused, nothing changed.
        """
        self._check(rank, epoch, step, owing=rank in self._ahead)
        return self.contributions.add(rank, step, bucket, start, data)

    def reduce(self, bucket: int) -> None:
        """Average what all trainers have delivered of a bucket."""
        self.contributions.reduce(bucket)

    def replace(self, rank: int, epoch: int, step: int, start: int, data: FloatArray) -> None:
        """Take parameters that the program has given other values, in ascending order; used from the next update on,
        because other trainers may still be reading the present ones.

        Raises:
            StaleEpoch, ProtocolError: refused, nothing changed.
        """
        self._check(rank, epoch, step)
        expected = self.shard.start + self._replaced
        if rank != 0 or start != expected or start + data.size > self.shard.stop:
            raise ProtocolError(f"rank {rank} sent parameters from word {start}, expected {expected} from rank 0")
        if self._replacement is None:
            self._replacement = aligned_empty(self.shard.length)
        self._replacement[self._replaced : self._replaced + data.size] = data
        self._replaced += data.size

    def commit(
        self, rank: int, epoch: int, step: int, ending: Ending, used: bytes = b"", *, ahead: bool = False
    ) -> bool:
        """A trainer has pushed all of its step, or nothing, where the average of the step before is to be used.

        Args:
            used: a byte for each parameter, not zero if this trainer's backward reached it.
            ahead: the rest of its pushes follows.

        Returns:
            True if all trainers have committed and pushed now: the caller then calls `update` or `average`.

        Raises:
            StaleEpoch, ProtocolError: refused, nothing changed.
            LayoutMismatch: the ending is not that of the other trainers.
        """
        self._check(rank, epoch, step)
        self._check_commit(rank, ending, ahead=ahead)
        for other, theirs in self._committed.items():
            if difference := ending.difference(theirs):
                mine, its, advice = difference
                raise LayoutMismatch(f"rank {rank} {mine} at step {step}, rank {other} {its}; {advice}")
        if self._committed and len(used) != len(self._used):
            raise ProtocolError(f"rank {rank} told of {len(used)} parameters at step {step}, not {len(self._used)}")
        self._used = bytes(a | b for a, b in zip(used, self._used, strict=True)) if self._committed else used
        self._committed[rank] = ending
        if ahead:
            self._ahead.add(rank)
        return self.is_due()

    def _check_commit(self, rank: int, ending: Ending, *, ahead: bool) -> None:
        """Whether a trainer has sent what it commits."""
        step, delivered = self.step, sum(self.contributions.delivered[rank])
        if ahead and (ending.again or ending.replaced or not ending.update):
            raise ProtocolError(f"rank {rank} committed step {step} ahead, which is for updates by new gradients only")
        if ending.again and not (ending.update and self._has_average):
            raise ProtocolError(f"rank {rank} wants to use an average again at step {step}, but there is none")
        if not ahead and delivered != (0 if ending.again else self.shard.length):
            raise ProtocolError(f"rank {rank} committed step {step} after {delivered} of {self.shard.length} words")
        if rank == 0 and ending.replaced and self._replaced != self.shard.length:
            raise ProtocolError(f"rank 0 replaced {self._replaced} of {self.shard.length} words at step {step}")

    @property
    def begun(self) -> bool:
        """Whether somebody has committed the step under way."""
        return bool(self._committed)

    @property
    def committed(self) -> bool:
        """Whether all trainers have committed the step under way, some perhaps ahead."""
        return len(self._committed) == len(self.ranks)

    @property
    def ending(self) -> Ending:
        """How the step ends, once somebody has committed."""
        return next(iter(self._committed.values()))

    def is_due(self, *, in_pieces: bool = False) -> bool:
        """Whether it is time for an update or `average`: all trainers have committed, and pushed everything; or, for
        `update_pieces`, a piece that has not been updated."""
        if not self.committed:
            return False
        return (in_pieces and self.contributions.there != self._updated) or not self.waiting_for()

    def update(self, updater: Updater) -> None:
        """Apply the averaged gradients of the whole shard; the next step begins."""
        self._take_replacement()
        updater.step(self.ending.learning_rate, self._used)
        self._end_step(has_average=False)

    def update_pieces(self, update: UpdateInPieces) -> list[tuple[int, int]]:
        """Average, if `reduce` has not, and update the pieces that are there; with the last the next step begins.

        Returns:
            (start, stop) of each run of words, counted from the arena's start, that is now the next step's.
        """
        self._take_replacement()
        contributions = self.contributions
        if self.ending.again:
            contributions.use_again()
        there = list(contributions.there)
        update.apply(self.ending.learning_rate, contributions.pieces_between(self._updated, there))
        runs = []
        for bucket, (part, a, b) in enumerate(zip(contributions.parts, self._updated, there, strict=True)):
            if a < b:
                runs.append((part.start + a, part.start + b))
                contributions.forget(bucket, b)
        self._updated = there
        if sum(there) == self.shard.length:
            self._end_step(has_average=False)
        return runs

    def averaged_with_the_update(self) -> list[int]:
        """The buckets of which something is there that neither `reduce` nor an update has averaged."""
        counts = zip(self.contributions.there, self.contributions.averaged, self._updated, strict=True)
        return [bucket for bucket, (there, averaged, updated) in enumerate(counts) if there > max(averaged, updated)]

    def average(self) -> None:
        """Leave it at the averaged gradients; the next step begins."""
        self._end_step(has_average=True)

    def waiting_for(self) -> list[int]:
        """The trainers that have not committed the step under way, or not pushed all of it."""
        return [rank for rank in self.ranks if not self.has_finished(rank)]

    def has_finished(self, rank: int) -> bool:
        """Whether a trainer has committed the step under way, and pushed all of it."""
        owes = rank in self._ahead and sum(self.contributions.delivered[rank]) < self.shard.length
        return rank in self._committed and not owes

    def _take_replacement(self) -> None:
        if self.ending.replaced and self._replacement is not None:
            self.parameters[...], self._replacement = self._replacement, None

    def _end_step(self, *, has_average: bool) -> None:
        self._has_average = has_average
        self.used_again += any(ending.again for ending in self._committed.values())
        self.step += 1
        self._begin_step()

    def _check(self, rank: int, epoch: int, step: int, *, owing: bool = False) -> None:
        if epoch != self.epoch:
            raise StaleEpoch(f"rank {rank} sent a message of epoch {epoch}, this is epoch {self.epoch}")
        if step != self.step:
            raise ProtocolError(f"rank {rank} sent step {step}, this is step {self.step}")
        if rank in self._committed and not owing:
            raise ProtocolError(f"rank {rank} sent more after committing step {step}")
