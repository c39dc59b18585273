"""The direct algorithm for ranks of one host: each reduces its chunk straight out of everyone's memory.

Every operation begins with a meeting (collective/transports/board.py), where the ranks compare what they are to do.

    in place    meet | reduce chunk `rank` of all arrays, block by block, and write it into all arrays | meet

A chunk is read by its reducer only, and after the first meeting everyone's values are final: so the reducer may
overwrite the chunk in all arrays at once. A block stays in the cache from its first reading to its last writing.
An all-reduce of M bytes then reads N M and writes N M bytes of memory in all, the least there is.

This needs all arrays to come from `empty`. Others are passed through the board's halves, piece by piece:

    staged      copy values in | meet | reduce, post results, copy the next values in | meet | copy results out, ...

Short ones, wherever they lie, through its common area: there every rank reduces by itself all that it needs, which
takes more additions and one meeting less. Each chunk is posted in the place of its term: term k has of every chunk the
values that come k-th in its canonical order, so that all chunks are added up at once:

    short       copy values in | meet | reduce              N = 4      chunk 0   chunk 1   chunk 2   chunk 3
                                                            term 0     rank 1    rank 2    rank 3    rank 0
                                                            term 1     rank 2    rank 3    rank 0    rank 1
                                                            ...

Source: the first is the shared-memory form of Rabenseifner's reduce-scatter and all-gather, "Optimization of
collective reduction operations", 2004.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from collective.algorithms.base import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    GATHER_CHUNKS,
    HAVE_IN_COMMON,
    OPERATIONS,
    REDUCE_SCATTER,
    Algorithm,
    Label,
)
from collective.transports.base import Array, Tag
from collective.transports.board import COMMON_BYTES, HALF_BYTES, Board
from common.system.memory import ALIGNMENT_BYTES
from common.tensors.buckets import chunk_bounds, segments
from common.tensors.reduction import Reduction, canonical_ranks

__all__ = ["DirectAlgorithm"]

NOTE = struct.Struct("<IQIHHIQ16s")  # the fields of a tag, and bytes: these must agree; place of the array
PLACE = struct.Struct("<QQ")  # segment number, offset in bytes
ELSEWHERE = PLACE.pack(0, 0)  # of an array that is not from `empty`: data segments count from 1
SHORT_BYTES = COMMON_BYTES  # terms of N such arrays fit there; of 64 KiB each rank would add too much
BLOCK_BYTES = 128 * 1024  # reduced at a time: a block of every rank stays in a core's L2 cache
MAX_PLANS = 128

Short = tuple[list[tuple[Array, slice]], list[Array], slice | None]  # where to post what; terms, of a chunk or of all
Plan = list[tuple[Sequence[Array], Sequence[Array]]]  # inputs in canonical order and outputs, for each block


T = TypeVar("T")


class DirectAlgorithm(Algorithm):
    """What it keeps from call to call is views of memory that lives as long as the group anyway."""

    name = "direct"

    def __init__(self, board: Board) -> None:
        self.rank, self.nranks = board.rank, board.nranks
        self._board = board
        self._others = [r for r in range(self.nranks) if r != self.rank]
        self._order = canonical_ranks(self.rank, self.nranks)
        self._section = HALF_BYTES // self.nranks // ALIGNMENT_BYTES * ALIGNMENT_BYTES  # of a half, one a chunk
        self._scratch = np.empty(max(BLOCK_BYTES, self._section) // 2, np.float32)  # so many float16 fit
        self._shorts: dict[tuple[object, ...], Short] = {}
        self._plans: dict[tuple[object, ...], Plan] = {}

    def empty(self, count: int, dtype: npt.DTypeLike) -> Array:
        return self._board.empty(count, dtype)

    def all_reduce(self, flat: Array, reduction: Reduction, label: Label) -> None:
        if flat.nbytes <= SHORT_BYTES:
            self._reduce_short(flat, reduction, label, ALL_REDUCE)
        else:
            self._reduce(flat, reduction, label, ALL_REDUCE)

    def reduce_scatter(self, flat: Array, reduction: Reduction, label: Label) -> None:
        if flat.nbytes <= SHORT_BYTES:
            self._reduce_short(flat, reduction, label, REDUCE_SCATTER)
        else:
            self._reduce(flat, reduction, label, REDUCE_SCATTER)

    def all_gather(self, rows: Array, label: Label) -> None:
        self._agree(label, ALL_GATHER + OPERATIONS * rows.dtype.num, rows[0].nbytes)
        for a, b in segments(0, rows[0].nbytes, HALF_BYTES):
            self._post(rows[self.rank], a, b)
            self._board.meet()
            for rank in self._others:
                self._fetch(rows[rank], a, b, rank)

    def gather_chunks(self, flat: Array, label: Label) -> None:
        where = self._board.locate(flat)
        place = PLACE.pack(*where) if where else ELSEWHERE
        places = self._agree(label, GATHER_CHUNKS + OPERATIONS * flat.dtype.num, flat.nbytes, place=place)
        bounds = chunk_bounds(flat.size, self.nranks)
        mine = slice(*bounds[self.rank])
        if ELSEWHERE not in places:  # everyone has come, so the others' arrays may be written to
            for rank in self._others:
                self._array_of(rank, places[rank], flat)[mine] = flat[mine]
            self._board.meet()
            return
        parts = [flat[a:b] for a, b in bounds]
        for a, b in segments(0, max(part.nbytes for part in parts), HALF_BYTES):
            self._post(parts[self.rank], a, min(b, parts[self.rank].nbytes))
            self._board.meet()
            for rank in self._others:
                self._fetch(parts[rank], a, min(b, parts[rank].nbytes), rank)

    def broadcast(self, flat: Array, root: int, label: Label) -> None:
        self._agree(label, BROADCAST + OPERATIONS * flat.dtype.num, flat.nbytes, root=root)
        for a, b in segments(0, flat.nbytes, HALF_BYTES):
            if self.rank == root:
                self._post(flat, a, b)
            self._board.meet()
            if self.rank != root:
                self._fetch(flat, a, b, root)

    def barrier(self, label: Label) -> None:
        self._agree(label, BARRIER, 0)

    def have_in_common(self, flat: Array, label: Label) -> bool:
        number = self._board.whole_segment(flat)
        place = ELSEWHERE if number is None else PLACE.pack(number, 0)
        places = self._agree(label, HAVE_IN_COMMON + OPERATIONS * flat.dtype.num, flat.nbytes, place=place)
        if number is None or ELSEWHERE in places:
            return False
        self._board.have_in_common(number, 0, PLACE.unpack(places[0])[0])
        return True

    def close(self, reason: str = "") -> None:
        self._board.close(reason)

    # The first meeting

    def _agree(self, label: Label, phase: int, nbytes: int, *, root: int = 0, place: bytes = ELSEWHERE) -> list[bytes]:
        """Meet, and compare what all ranks are about to do; returns where everyone's array lies."""
        mine = NOTE.pack(*label, phase, root, 0, nbytes, place)
        everyones = self._board.exchange(mine)
        if everyones == mine * self.nranks:
            return [place] * self.nranks
        notes = [everyones[at : at + NOTE.size] for at in range(0, len(everyones), NOTE.size)]
        for rank, note in enumerate(notes):
            check(mine, note, rank)
        return [note[-PLACE.size :] for note in notes]

    # Short arrays

    def _reduce_short(self, flat: Array, reduction: Reduction, label: Label, operation: int) -> None:
        key = (operation, reduction.number, flat.size, self._board.turn)
        short = self._shorts.get(key)
        if short is None:
            short = remember(self._shorts, key, self._plan_short(flat, operation))
        places, terms, wanted = short
        for place, chunk in places:
            place[...] = flat[chunk]
        self._agree(label, operation + OPERATIONS * reduction.number, flat.nbytes)
        reduction.reduce(terms, (flat if wanted is None else flat[wanted],), self._scratch)

    def _plan_short(self, flat: Array, operation: int) -> Short:
        common = self._board.common[self._board.turn].view(flat.dtype)
        apart = -(-flat.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // flat.itemsize
        terms = [common[k * apart :][: flat.size] for k in range(self.nranks)]
        chunks = [slice(*bounds) for bounds in chunk_bounds(flat.size, self.nranks)]
        places = [
            (terms[canonical_ranks(c, self.nranks).index(self.rank)][chunk], chunk)
            for c, chunk in enumerate(chunks)
            if chunk.start < chunk.stop
        ]
        if operation == ALL_REDUCE:
            return places, terms, None
        return places, [term[chunks[self.rank]] for term in terms], chunks[self.rank]

    # Arrays in shared memory

    def _reduce(self, flat: Array, reduction: Reduction, label: Label, operation: int) -> None:
        where = self._board.locate(flat)
        place = PLACE.pack(*where) if where else ELSEWHERE
        if not where:
            self._copy_in(flat, self._cuts(flat)[0])
        places = self._agree(label, operation + OPERATIONS * reduction.number, flat.nbytes, place=place)
        if ELSEWHERE in places:
            self._reduce_staged(flat, reduction, operation, places)
        else:
            self._reduce_in_place(flat, reduction, operation, places)

    def _reduce_in_place(self, flat: Array, reduction: Reduction, operation: int, places: list[bytes]) -> None:
        key = (operation, reduction, flat.size, *places)
        plan = self._plans.get(key)
        if plan is None:
            plan = remember(self._plans, key, self._plan_in_place(flat, operation, places))
        for inputs, outputs in plan:
            reduction.reduce(inputs, outputs, self._scratch)
        self._board.meet()

    def _plan_in_place(self, flat: Array, operation: int, places: list[bytes]) -> Plan:
        arrays = [self._array_of(r, places[r], flat) for r in self._order]
        plan: Plan = []
        for a, b in segments(*chunk_bounds(flat.size, self.nranks)[self.rank], BLOCK_BYTES // flat.itemsize):
            inputs = [array[a:b] for array in arrays]
            plan.append((inputs, inputs if operation == ALL_REDUCE else [inputs[0], inputs[-1]]))
        return plan

    def _array_of(self, rank: int, place: bytes, like: Array) -> Array:
        number, offset = PLACE.unpack(place)
        return self._board.array_of(rank, number, offset, like.size, like.dtype)

    # Arrays elsewhere

    def _reduce_staged(self, flat: Array, reduction: Reduction, operation: int, places: list[bytes]) -> None:
        """Arrays of other ranks that do lie in shared memory are read there even so."""
        located = {r: self._array_of(r, place, flat) for r, place in enumerate(places) if place != ELSEWHERE}
        located[self.rank] = flat
        cuts = self._cuts(flat)
        for piece, following in zip_longest(cuts, cuts[1:]):
            if places[self.rank] == ELSEWHERE and following:
                self._copy_in(flat, following)
            mine = piece[self.rank]
            own = flat[mine]
            inputs = [located[r][mine] if r in located else self._posted(r, self.rank, own) for r in self._order]
            reduction.reduce(inputs, (self._posting(self.rank, own), own), self._scratch)
            self._board.meet()
            if operation == ALL_REDUCE:
                for chunk in self._others:
                    part = flat[piece[chunk]]
                    part[...] = self._posted(chunk, chunk, part)

    def _cuts(self, flat: Array) -> list[list[slice]]:
        return cut_pieces(flat.size, self.nranks, self._section // flat.itemsize)

    def _copy_in(self, flat: Array, piece: list[slice]) -> None:
        """Post this rank's values of the chunks that others reduce."""
        for chunk in self._others:
            part = flat[piece[chunk]]
            self._posting(chunk, part)[...] = part

    def _posting(self, chunk: int, like: Array) -> Array:
        """This rank's section for a chunk, to be written before the coming meeting."""
        return self._section_of(self._board.halves[self._board.turn][self.rank], chunk, like)

    def _posted(self, rank: int, chunk: int, like: Array) -> Array:
        """What `rank` wrote there before the last one."""
        return self._section_of(self._board.halves[1 - self._board.turn][rank], chunk, like)

    def _section_of(self, half: Array, chunk: int, like: Array) -> Array:
        begin = chunk * self._section
        return half[begin : begin + like.nbytes].view(like.dtype)

    # Bytes

    def _post(self, data: Array, a: int, b: int) -> None:
        if a >= b:
            return
        self._board.halves[self._board.turn][self.rank][: b - a] = data.view(np.uint8)[a:b]

    def _fetch(self, data: Array, a: int, b: int, rank: int) -> None:
        if a >= b:
            return
        data.view(np.uint8)[a:b] = self._board.halves[1 - self._board.turn][rank][: b - a]


@lru_cache(maxsize=MAX_PLANS)
def cut_pieces(length: int, nranks: int, limit: int) -> list[list[slice]]:
    """Where each chunk's part of every piece lies: the first `limit` elements of each chunk, the next ones, ...

    >>> cut_pieces(64, 3, 20)
    [[slice(0, 20, None), slice(32, 48, None), slice(48, 64, None)],
     [slice(20, 32, None), slice(48, 48, None), slice(64, 64, None)]]
    """
    bounds = chunk_bounds(length, nranks)
    longest = max(stop - start for start, stop in bounds)
    return [
        [slice(min(start + at, stop), min(start + at + limit, stop)) for start, stop in bounds]
        for at in range(0, longest, limit)
    ]


def remember(kept: dict[tuple[object, ...], T], key: tuple[object, ...], value: T) -> T:
    """Keep a plan, but not too many."""
    if len(kept) >= MAX_PLANS:
        kept.clear()
    kept[key] = value
    return value


def check(mine: bytes, theirs: bytes, rank: int) -> None:
    """Raise StaleEpoch or ProtocolError if `rank` is about to do something else."""
    *expected, expected_bytes, _ = NOTE.unpack(mine)
    *got, got_bytes, _ = NOTE.unpack(theirs)
    Tag(*expected).check(Tag(*got), rank)
    Tag(*got).check_size(got_bytes, expected_bytes, rank)
