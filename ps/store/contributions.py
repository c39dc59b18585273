"""What trainers have sent of one step's gradients, and the averages made of it."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import islice, pairwise
from operator import itemgetter

from common.errors import ProtocolError
from common.system.memory import aligned_empty
from common.tensors.arena import FloatArray
from common.tensors.buckets import ALIGNMENT, Bucket, pieces_of, words
from common.tensors.parts import PADDING, Piece
from common.tensors.reduction import piece_reducer, reduce_bucket, reduce_piece
from ps.store.shards import Shard, shard_of_bucket

__all__ = ["WHOLE", "WORTH_HELP", "Contributions"]

WORTH_HELP = 1 << 18  # words of a bucket; handing a smaller one's half to another thread takes longer than adding it
WHOLE = 1 << 62  # as `piece`: buckets are not cut


class Contributions:
    """The gradients of one shard, for the step under way: each trainer's as they come, and their average.

    What is pushed is kept as it comes, without a copy, until it is averaged; gradients that are read in place are not
    kept at all. The array of averages is made when it is first needed.

    Args:
        ranks: the trainers that take part.
        piece: words, a multiple of ALIGNMENT: what all have delivered counts in pieces of so many.
        empty: makes the array of averages.
        gradients: that array, if it is there already (not padded).
        helper: a thread on which half of a large bucket is averaged.
    """

    def __init__(
        self,
        shard: Shard,
        buckets: Sequence[Bucket],
        ranks: Sequence[int],
        *,
        piece: int = WHOLE,
        empty: Callable[[int], FloatArray] = aligned_empty,
        gradients: FloatArray | None = None,
        helper: ThreadPoolExecutor | None = None,
    ) -> None:
        self.shard, self.ranks, self.piece = shard, ranks, piece
        self.parts = [shard_of_bucket(shard, bucket) for bucket in buckets]
        self._buckets, self._empty, self._helper = list(buckets), empty, helper
        self._in_place: dict[int, FloatArray] = {}  # gradients that are read where the trainer has them
        self._reducers: dict[Piece, Callable[[FloatArray], object]] = {}  # of pieces, all of which lie there
        if gradients is not None:
            self.gradients = gradients
        self.begin_step()

    def begin_step(self) -> None:
        """Nothing has come of the next step. All counts are words of each bucket's part, from its start on."""
        nothing = [0] * len(self.parts)
        self.delivered = {rank: list(nothing) for rank in self.ranks}
        self.there = list(nothing)  # delivered by all, in whole pieces
        self.averaged = list(nothing)  # of these, by `reduce`
        # (rank, bucket) to (where it begins in the slice, the words) of what was pushed and is not averaged, in order
        self._sent: defaultdict[tuple[int, int], list[tuple[int, FloatArray]]] = defaultdict(list)

    @cached_property
    def padded_gradients(self) -> FloatArray:
        """The averaged gradients, and PADDING zeros."""
        array = self._empty(self.shard.length + PADDING)
        array.fill(0)
        return array

    @cached_property
    def gradients(self) -> FloatArray:
        """Where the averaged gradients of the shard are found once all buckets are reduced."""
        return self.padded_gradients[: self.shard.length]

    def read_in_place(self, rank: int, step: int, array: FloatArray) -> None:
        """A trainer's gradients of the shard lie in this memory, from now on.

        Raises:
            ProtocolError: it has pushed words of this step.
        """
        if any(sent for (each, _), sent in self._sent.items() if each == rank):
            raise ProtocolError(f"rank {rank} offered its gradients after it had pushed some of step {step}")
        self._in_place[rank] = array
        self._reducers.clear()

    def in_place(self, rank: int) -> FloatArray:
        """Where the gradients of a trainer lie that are read in place."""
        return self._in_place[rank]

    def add(self, rank: int, step: int, bucket: int, start: int, data: FloatArray | int) -> bool:
        """Take gradients of one trainer, as StepState.push."""
        if not 0 <= bucket < len(self.parts):
            raise ProtocolError(f"rank {rank} pushed bucket {bucket} of {len(self.parts)} at step {step}")
        part, done = self.parts[bucket], self.delivered[rank][bucket]
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
        if isinstance(data, int) != (rank in self._in_place):
            raise ProtocolError(f"rank {rank} pushed words at step {step} where they are not expected")
        if not isinstance(data, int) and size:
            self._sent[rank, bucket].append((start - self.shard.start, data))
        self.delivered[rank][bucket] += size
        least, before = min(self.delivered[each][bucket] for each in self.ranks), self.there[bucket]
        self.there[bucket] = least if least == part.length else least - least % self.piece
        return self.there[bucket] > before

    def reduce(self, bucket: int) -> None:
        """Average what all trainers have delivered of a bucket, into `gradients`."""
        mean, offset = self.gradients, self.parts[bucket].start - self.shard.start
        first, last = offset + self.averaged[bucket], offset + self.there[bucket]
        if self._helper is None or last - first < WORTH_HELP:
            self._average(reduce_bucket, bucket, first, last, mean[first:last])
        else:
            middle = first + (last - first) // 2 // ALIGNMENT * ALIGNMENT
            second = self._helper.submit(self._average, reduce_bucket, bucket, middle, last, mean[middle:last])
            self._average(reduce_bucket, bucket, first, middle, mean[first:middle])
            second.result()
        self.averaged[bucket] = self.there[bucket]
        self.forget(bucket, self.there[bucket])

    def use_again(self) -> None:
        """Instead of anything new, `gradients` as they are count as this step's averages."""
        self.there = [part.length for part in self.parts]
        self.averaged = list(self.there)

    def average(self, piece: Piece, out: FloatArray) -> None:
        """Write a piece's average to `out`, of its length, whether it is known already or not. Thread-safe."""
        known = self.parts[piece.bucket].start - self.shard.start + self.averaged[piece.bucket]
        if piece.stop <= known:
            out[...] = self.gradients[piece.start : piece.stop]
        elif len(self._in_place) == len(self.ranks):
            if piece not in self._reducers:  # finding the loops takes as long as adding up a tenth of a piece
                self._reducers[piece] = self._reducer(piece)
            self._reducers[piece](out)
        else:
            self._average(reduce_piece, piece.bucket, piece.start, piece.stop, out)

    def forget(self, bucket: int, done: int) -> None:
        """The first `done` words of a bucket's part are not needed any longer."""
        stop = self.parts[bucket].start - self.shard.start + done
        for rank in self.ranks:
            sent = self._sent.get((rank, bucket))
            while sent and sent[0][0] + sent[0][1].size <= stop:
                del sent[0]

    def pieces_between(self, begun: Sequence[int], done: Sequence[int]) -> list[Piece]:
        """The pieces of those words of each bucket's part."""
        found = []
        for bucket, (part, a, b) in enumerate(zip(self.parts, begun, done, strict=True)):
            offset = part.start - self.shard.start
            found += [Piece(bucket, i, j) for i, j in pieces_of(offset + a, offset + b, self.piece)]
        return found

    def pieces(self) -> list[Piece]:
        """All of the shard, bucket by bucket; of `piece` words but for the last of each."""
        return self.pieces_between([0] * len(self.parts), [part.length for part in self.parts])

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

    def _reducer(self, piece: Piece) -> Callable[[FloatArray], object]:
        """Writes the average of a piece, whose gradients are all read in place, to an array of its length."""
        whole = self._buckets[piece.bucket]
        kind, word = whole.dtype, words(whole.dtype)
        reduce = piece_reducer(
            [self._in_place[rank][piece.start : piece.stop].view(kind) for rank in self.ranks],
            bucket_start=(whole.start - self.shard.start - piece.start) // word,
            bucket_length=whole.length // word,
            start=0,
            stop=(piece.stop - piece.start) // word,
        )
        return lambda out: reduce(out.view(kind))

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
        if rank in self._in_place:
            return self._in_place[rank][start:stop]
        sent = self._sent[rank, bucket]
        first, data = sent[bisect_right(sent, start, key=itemgetter(0)) - 1]
        return data[start - first : stop - first]
