"""One server's state as a state machine: it knows no gRPC, no thread and no clock.

A step goes through three stages, in this order, whatever the order in which trainers are heard:

    push    every trainer delivers every word of the shard, bucket by bucket, exactly once
    reduce  what all trainers have delivered is averaged in canonical order (common/tensors/reduction.py), by pieces
    commit  once all trainers have committed, the optimizer updates the shard, and the next step begins

A trainer that knows how its step will end may commit it ahead of its pushes. Once all trainers have committed, an
updater that takes pieces averages and updates each as soon as all have delivered it, while the others are still on
their way; until the last one the shard is partly old and partly new.

Trainers may also agree to end a step with the average alone; a commit of the next step may then use that average
instead of new gradients. Whatever does not fit (an old epoch, another step, a word twice, a commit with pushes
missing) is refused with an error and changes nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from operator import itemgetter

from common.errors import LayoutMismatch, ProtocolError, StaleEpoch
from common.system.memory import aligned_empty
from common.tensors.arena import FloatArray
from common.tensors.buckets import ALIGNMENT, Bucket, segments, words
from common.tensors.parts import PADDING, Piece
from common.tensors.reduction import reduce_bucket, reduce_piece
from common.tensors.updater import InPieces, Updater
from ps.store.shards import Shard, shard_of_bucket

__all__ = ["Ending", "Store"]

WORTH_HELP = 1 << 18  # words of a bucket; handing a smaller one's half to another thread takes longer than adding it


@dataclass(frozen=True)
class Ending:
    """How a step ends, of which all trainers must have the same opinion.

    Args:
        update: apply the optimizer; otherwise the average is all that is wanted.
        replaced: the program has given the parameters other values; rank 0's are taken first.
        again: use the average that ended the step before, instead of new gradients.
    """

    learning_rate: float
    update: bool = True
    replaced: bool = False
    again: bool = False

    def difference(self, other: Ending) -> tuple[str, str, str] | None:
        """The first disagreement: what this one did, what the other did, and what to do about it."""
        if (self.update, self.again) != (other.update, other.again):
            return self._did(), other._did(), "all ranks must do the same"
        if self.learning_rate != other.learning_rate:
            mine = f"has learning rate {self.learning_rate}"
            return mine, f"has {other.learning_rate}", "give all trainers the same --lr and scheduler"
        if self.replaced != other.replaced:
            mine, theirs = (("changed" if e.replaced else "kept") + " its parameters" for e in (self, other))
            return mine, theirs, "load the same state on all ranks"
        return None

    def _did(self) -> str:
        if not self.update:
            return "ran another backward before optimizer.step()"
        return "called optimizer.step() " + ("without another backward" if self.again else "after a backward")


class Store:
    """The parameters of one shard, and the gradients of the step under way.

    Args:
        shard: the slice of the arena; every `start` below counts from the arena's start, not the slice's.
        buckets: the whole arena's bucket plan.
        empty: makes its arrays.
        helper: a thread on which half of a large bucket is reduced.
        ranks: the trainers that take part, if not all `nranks`.
        piece: words, a multiple of ALIGNMENT: buckets are cut into pieces of so many; by default not at all.

    All positions and sizes are in words of 4 bytes.

    Memory: the shard's parameters. What trainers push, as it comes and without a copy, until it is averaged: no more
    than trainers are apart, and nothing of those whose gradients are read in place. The averaged gradients, once
    something is averaged before it is updated.
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
        piece: int = 1 << 62,
    ) -> None:
        self.shard, self.nranks, self.epoch = shard, nranks, epoch
        self.ranks = range(nranks) if ranks is None else ranks
        self.step, self.piece = 0, piece
        self._empty, self._helper = empty, helper
        self._replacement: FloatArray | None = None  # parameters that rank 0 has sent, used from the next update on
        self._averaged = False  # `gradients` holds the average of the step before, not used yet
        self._used = b""  # which parameters some trainer's backward has reached
        self._replaced = 0  # words of the replacement that have arrived
        self._elsewhere: dict[int, FloatArray] = {}  # contributions that are read where the trainer has them
        self._buckets = list(buckets)
        self._parts = [shard_of_bucket(shard, bucket) for bucket in buckets]
        self._begin_step()

    @cached_property
    def padded_parameters(self) -> FloatArray:
        """The shard's parameters, and PADDING zeros."""
        return self._padded()

    @cached_property
    def parameters(self) -> FloatArray:
        """The shard's parameters."""
        return self.padded_parameters[: self.shard.length]

    @cached_property
    def padded_gradients(self) -> FloatArray:
        """The averaged gradients, and PADDING zeros."""
        return self._padded()

    @cached_property
    def gradients(self) -> FloatArray:
        """Where the averaged gradients of the shard are found once all buckets are reduced."""
        return self.padded_gradients[: self.shard.length]

    def keep_parameters_in(self, array: FloatArray) -> None:
        """Before anything else is done with them: the shard's parameters are to lie in this memory (not padded)."""
        self.parameters = array

    def read_in_place(self, rank: int, array: FloatArray) -> None:
        """A trainer's gradients of the shard lie in this memory, from now on: it only pushes how many are there.

        Raises:
            ProtocolError: it has pushed words of this step.
        """
        if any(sent for (each, _), sent in self._sent.items() if each == rank):
            raise ProtocolError(f"rank {rank} offered its gradients after it had pushed some of step {self.step}")
        self._elsewhere[rank] = array

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
        if not 0 <= bucket < len(self._parts):
            raise ProtocolError(f"rank {rank} pushed bucket {bucket} of {len(self._parts)} at step {step}")
        part, done = self._parts[bucket], self._delivered[rank][bucket]
        size = data if isinstance(data, int) else data.size
        if start != part.start + done or start + size > part.stop:
            raise ProtocolError(
                f"rank {rank} pushed words {start}..{start + size} of bucket {bucket} at step {step}, "
                f"expected them from {part.start + done} up to {part.stop}"
            )
        if size % words(self._buckets[bucket].dtype):
            raise ProtocolError(
                f"rank {rank} pushed a part of an element, {size} words, of bucket {bucket} at step {step}"
            )
        if isinstance(data, int) != (rank in self._elsewhere):
            raise ProtocolError(f"rank {rank} pushed words at step {step} where they are not expected")
        if not isinstance(data, int) and size:
            self._sent[rank, bucket].append((start - self.shard.start, data))
        self._delivered[rank][bucket] += size
        least = min(self._delivered[rank][bucket] for rank in self.ranks)
        self._there_of[bucket] = least if least == part.length else least - least % self.piece
        return self._there_of[bucket] > self._averaged_of[bucket]

    def reduce(self, bucket: int) -> None:
        """Average what all trainers have delivered of a bucket."""
        mean, offset = self.gradients, self._parts[bucket].start - self.shard.start
        first, last = offset + self._averaged_of[bucket], offset + self._there_of[bucket]
        if self._helper is None or last - first < WORTH_HELP:
            self._average(reduce_bucket, bucket, first, last, mean[first:last])
        else:
            middle = first + (last - first) // 2 // ALIGNMENT * ALIGNMENT
            second = self._helper.submit(self._average, reduce_bucket, bucket, middle, last, mean[middle:last])
            self._average(reduce_bucket, bucket, first, middle, mean[first:middle])
            second.result()
        self._averaged_of[bucket] = self._there_of[bucket]
        self._forget(bucket, last)

    def _average(self, average: Callable[..., None], bucket: int, start: int, stop: int, out: FloatArray) -> None:
        """Write the average of words start..stop of a bucket, counted from the slice's start, to `out`.

        Args:
            average: reduce_bucket or reduce_piece.
            out: of their length.
        """
        whole = self._buckets[bucket]
        kind, word = whole.dtype, words(whole.dtype)
        for a, b in self._runs(bucket, start, stop):
            average(
                [self._words_of(rank, bucket, a, b).view(kind) for rank in self.ranks],
                out[a - start : b - start].view(kind),
                bucket_start=(whole.start - self.shard.start - a) // word,
                bucket_length=whole.length // word,
                start=0,
                stop=(b - a) // word,
            )

    def _runs(self, bucket: int, start: int, stop: int) -> Iterable[tuple[int, int]]:
        """Those words of a bucket in runs that lie, of every trainer, in one array."""
        cuts = {start, stop}
        for rank in self.ranks:
            sent = self._sent.get((rank, bucket), [])
            for first, _ in islice(sent, bisect_right(sent, start, key=itemgetter(0)), None):
                if first >= stop:
                    break
                cuts.add(first)
        return pairwise(sorted(cuts))

    def _words_of(self, rank: int, bucket: int, start: int, stop: int) -> FloatArray:
        """Of one trainer, words start..stop of a bucket, counted from the slice's start: one of its runs."""
        if rank in self._elsewhere:
            return self._elsewhere[rank][start:stop]
        sent = self._sent[rank, bucket]
        first, data = sent[bisect_right(sent, start, key=itemgetter(0)) - 1]
        return data[start - first : stop - first]

    def _forget(self, bucket: int, stop: int) -> None:
        """Up to there, counted from the slice's start, what was pushed of a bucket is averaged."""
        for rank in self.ranks:
            sent = self._sent.get((rank, bucket), [])
            while sent and sent[0][0] + sent[0][1].size <= stop:
                del sent[0]

    def _average_of(self, piece: Piece, out: FloatArray) -> None:
        """Write a piece's average to `out`, of its length, whether it is known already or not."""
        part = self._parts[piece.bucket]
        averaged = part.start - self.shard.start + self._averaged_of[piece.bucket]
        if self.ending.again or piece.stop <= averaged:
            out[...] = self.gradients[piece.start : piece.stop]
        else:
            self._average(reduce_piece, piece.bucket, piece.start, piece.stop, out)

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
        delivered = sum(self._delivered[rank])
        if ahead and (ending.again or ending.replaced or not ending.update):
            raise ProtocolError(f"rank {rank} committed step {step} ahead, which is for updates by new gradients only")
        if ending.again and not (ending.update and self._averaged):
            raise ProtocolError(f"rank {rank} wants to use an average again at step {step}, but there is none")
        if not ahead and delivered != (0 if ending.again else self.shard.length):
            raise ProtocolError(f"rank {rank} committed step {step} after {delivered} of {self.shard.length} words")
        if rank == 0 and ending.replaced and self._replaced != self.shard.length:
            raise ProtocolError(f"rank 0 replaced {self._replaced} of {self.shard.length} words at step {step}")
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
        """Whether it is time for `update` or `average`: all trainers have committed, and pushed everything; or, with an
        updater that takes pieces, one that has not been updated."""
        if not self.committed:
            return False
        return (in_pieces and self._there_of != self._updated_of) or not self.waiting_for()

    def update(self, updater: Updater | InPieces) -> list[tuple[int, int]]:
        """Apply the gradients, all of the step's or the pieces that are there, which an updater that takes pieces has
        averaged if `reduce` has not; with the last the next step begins.

        Returns:
            (start, stop) of each run of words, counted from the arena's start, that is now the next step's.
        """
        ending = self.ending
        if ending.replaced and self._replacement is not None:
            self.parameters[...], self._replacement = self._replacement, None
        if isinstance(updater, InPieces):
            runs = self._update_pieces(updater)
            if not ending.again and sum(self._updated_of) < self.shard.length:
                return runs
        else:
            updater.step(ending.learning_rate, self._used)
            runs = [(self.shard.start, self.shard.stop)]
        self._averaged = False
        self._end_step()
        return runs

    def averaged_with_the_update(self) -> list[int]:
        """The buckets of which something is there that neither `reduce` nor an update has averaged."""
        return [
            bucket
            for bucket, there in enumerate(self._there_of)
            if there > max(self._averaged_of[bucket], self._updated_of[bucket])
        ]

    def _update_pieces(self, updater: InPieces) -> list[tuple[int, int]]:
        there = [part.length for part in self._parts] if self.ending.again else self._there_of
        updater.step(self.ending.learning_rate, self._pieces_between(self._updated_of, there), self._average_of)
        runs = []
        for bucket, (part, a, b) in enumerate(zip(self._parts, self._updated_of, there, strict=True)):
            if a < b:
                runs.append((part.start + a, part.start + b))
                self._forget(bucket, part.start + b - self.shard.start)
        self._updated_of[:] = there
        return runs

    def pieces(self) -> list[Piece]:
        """All of the shard, bucket by bucket; of `self.piece` words but for the last of each."""
        return self._pieces_between([0] * len(self._parts), [part.length for part in self._parts])

    def _pieces_between(self, begun: Sequence[int], done: Sequence[int]) -> list[Piece]:
        """The pieces of those words of each bucket."""
        found = []
        for bucket, (part, a, b) in enumerate(zip(self._parts, begun, done, strict=True)):
            offset = part.start - self.shard.start
            found += [Piece(bucket, i, j) for i, j in segments(offset + a, offset + b, self.piece)]
        return found

    def average(self) -> None:
        """Leave it at the averaged gradients; the next step begins."""
        self._averaged = True
        self._end_step()

    def _end_step(self) -> None:
        self.step += 1
        self._begin_step()

    def averaged(self) -> FloatArray:
        """The average that ended the step; it may be read until all trainers have pushed a piece of the next step."""
        return self.gradients

    def waiting_for(self) -> list[int]:
        """The trainers that have not committed the step under way, or not pushed all of it."""
        return [rank for rank in self.ranks if not self.has_finished(rank)]

    def has_finished(self, rank: int) -> bool:
        """Whether a trainer has committed the step under way, and pushed all of it."""
        owes = rank in self._ahead and sum(self._delivered[rank]) < self.shard.length
        return rank in self._committed and not owes

    def _begin_step(self) -> None:
        self._delivered = [[0] * len(self._parts) for _ in range(self.nranks)]
        self._there_of = [0] * len(self._parts)  # words of each bucket's part, from its start on: whole pieces of all
        self._averaged_of = [0] * len(self._parts)  # likewise, by `reduce`
        self._updated_of = [0] * len(self._parts)  # likewise, by an updater that takes pieces
        self._committed: dict[int, Ending] = {}
        self._ahead: set[int] = set()  # who has committed ahead
        self._used, self._replaced = b"", 0
        # (rank, bucket) to (where it begins in the slice, the words) of what was pushed and is not averaged, in order
        self._sent: defaultdict[tuple[int, int], list[tuple[int, FloatArray]]] = defaultdict(list)

    def contribution(self, rank: int) -> FloatArray:
        """Where the gradients of a trainer lie that are read in place."""
        return self._elsewhere[rank]

    def _padded(self) -> FloatArray:
        array = self._empty(self.shard.length + PADDING)
        array.fill(0)
        return array

    def _check(self, rank: int, epoch: int, step: int, *, owing: bool = False) -> None:
        if epoch != self.epoch:
            raise StaleEpoch(f"rank {rank} sent a message of epoch {epoch}, this is epoch {self.epoch}")
        if step != self.step:
            raise ProtocolError(f"rank {rank} sent step {step}, this is step {self.step}")
        if rank in self._committed and not owing:
            raise ProtocolError(f"rank {rank} sent more after committing step {step}")
