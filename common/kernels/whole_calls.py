"""Whole reductions of collective/shared_memory, meetings among them, as one call of machine code.

    short    post the values | meet | reduce                                        collective/shared_memory/short.py
    placed   meet | reduce where the arrays lie | meet                              collective/shared_memory/in_place.py
    staged   copy values in | meet | reduce, post results, copy the next in | ...   collective/shared_memory/staged.py
    paired   copy values in | meet | copy the next in, reduce | meet | ...          collective/shared_memory/paired.py

A call that comes to LATE has arrived at a meeting; called again, it goes on from there: POSITION says from where. One
that comes to DIFFERENT at its first meeting has not changed the array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.kernels.copy_lines import stream_lines
from common.kernels.intrinsics import call_3, fence, load, one_by_one, part, store
from common.kernels.layout import (
    AGREED,
    ALL,
    APART,
    AREAS,
    ARRAY,
    ARRAY_DATA,
    COUNT,
    EACH,
    ELEMENT,
    ELEMENTS,
    FACTOR,
    FIRST,
    FRAME,
    GATHERS,
    HERE,
    ITEM,
    LATE,
    LINE_BYTES,
    MEMCPY,
    MET,
    NOTE,
    ORDER,
    PAIR,
    PAIR_SLOTS,
    PAST,
    PIECES,
    PLACE,
    POSITION,
    RANK,
    RESULT,
    SECTION,
    SEQUENCE,
    SHORT_CHUNKS,
    TABLES,
    UNFIT,
    WORD,
)
from common.kernels.meeting import arrive, fits, take_note, wait_for_all, wait_within
from common.kernels.names import NEW, Reduce, Whole
from common.kernels.reduce_loop import addresses_of, reduction_of, terms_of, value_at, write_to

__all__ = ["paired", "placed", "short", "staged"]


def reducing(kernel: Whole, outputs: tuple[int, ...]) -> Callable[[Any, Any, Any], None]:
    """Reduce so many elements of the first N addresses of a tuple, and write them to those of these numbers."""
    value, write = value_at(kernel.dtype), write_to(outputs, kernel.dtype)
    reduction = reduction_of(Reduce(kernel.op, kernel.dtype, kernel.nranks, (NEW,)))

    @part
    def plain(where: Any, count: Any, _: Any) -> None:
        for i in range(count):
            write(where, i, reduction(where, i))

    @part
    def scaled(where: Any, count: Any, plan: Any) -> None:
        factor = value(plan + WORD * FACTOR)
        for i in range(count):
            write(where, i, reduction(where, i) * factor)

    return scaled if kernel.op == "mean" else plain


@part
def copy(frame: Any, to: Any, source: Any, nbytes: Any) -> None:
    call_3(load(frame + WORD * MEMCPY), to, source, nbytes)


@part
def copy_past_the_cache(frame: Any, to: Any, source: Any, nbytes: Any) -> None:
    """A part of a large array, which is so not read before it is written. Ordered by `fence` only."""
    first = min(-to & (LINE_BYTES - 1), nbytes)
    lines = (nbytes - first) // LINE_BYTES
    rest = first + lines * LINE_BYTES
    copy(frame, to, source, first)
    stream_lines(to + first, source + first, lines)
    copy(frame, to + rest, source + rest, nbytes - rest)


def short(kernel: Whole) -> Callable[[Any], None]:
    nranks = kernel.nranks
    terms, reduce = terms_of(nranks), reducing(kernel, (nranks,))

    @part
    def post(plan: Any, values: Any) -> None:
        frame = load(plan + WORD * FRAME)
        area, rank = load(plan + WORD * (AREAS + (load(frame + WORD * SEQUENCE) + 1 & 1))), load(frame + WORD * RANK)
        for chunk in range(nranks):
            begin, end = load(plan + WORD * (SHORT_CHUNKS + chunk)), load(plan + WORD * (SHORT_CHUNKS + chunk + 1))
            term = (rank - chunk - 1) % nranks
            place = area + term * load(plan + WORD * APART) + begin
            copy(frame, place, values + begin, end - begin)

    def short(plan: Any) -> None:  # a kernel
        frame, values = load(plan + WORD * FRAME), load(load(plan + WORD * ARRAY) + ARRAY_DATA)
        found = UNFIT
        if load(plan + WORD * POSITION) or fits(plan):
            if not load(plan + WORD * POSITION):
                post(plan, values)
                take_note(plan)
                arrive(frame)
            found = wait_for_all(frame)
            if found == MET:
                first = load(plan + WORD * FIRST)
                area = load(plan + WORD * (AREAS + (load(frame + WORD * SEQUENCE) & 1))) + first
                reduce(terms(area, load(plan + WORD * APART), values + first), load(plan + WORD * COUNT), plan)
            store(plan + WORD * POSITION, 1 if found == LATE else 0)
        store(frame + WORD * RESULT, found)

    return short


def placed(kernel: Whole) -> Callable[[Any], None]:
    ranks = tuple(range(kernel.nranks))
    reduce, addresses = reducing(kernel, ranks), addresses_of(kernel.nranks)

    def placed(plan: Any) -> None:  # a kernel
        frame = load(plan + WORD * FRAME)
        position, found = load(plan + WORD * POSITION), UNFIT
        if position or fits(plan):
            if not position:
                take_note(plan)
                store(frame + WORD * (NOTE + 4), load(plan + WORD * PLACE))
                store(frame + WORD * (NOTE + 5), load(plan + WORD * (PLACE + 1)))
                arrive(frame)
                position = 1
            found = wait_for_all(frame)
            if found == MET and position == 1:
                reduce(addresses(plan + WORD * ORDER), load(plan + WORD * ELEMENTS), plan)
                arrive(frame)
                position = 2
                found = wait_within(frame)
            store(plan + WORD * POSITION, position if found == LATE else 0)
        store(frame + WORD * RESULT, found)

    return placed


def beginning(chunks: int) -> Callable[[Any, Any, Any], Any]:
    """Of a chunk's part of a piece, in bytes, by a plan that has the chunks from that word on."""

    @part
    def begin_of(plan: Any, chunk: Any, piece: Any) -> Any:
        start, stop = load(plan + WORD * (chunks + chunk)), load(plan + WORD * (chunks + chunk + 1))
        return min(start + piece * load(plan + WORD * SECTION), stop)

    return begin_of


def staged(kernel: Whole) -> Callable[[Any], None]:
    """A plan's tables, from TABLES on: CHUNKS, N + 1 words; SOURCES, N; HALVES, 2 N; INPUTS, N + 1."""
    nranks = kernel.nranks
    chunks, sources = TABLES, TABLES + nranks + 1
    halves, inputs = sources + nranks, sources + 3 * nranks
    reduce, addresses = reducing(kernel, (nranks, nranks - 1)), addresses_of(nranks + 1)
    begin_of = beginning(chunks)

    @part
    def section_of(plan: Any, sequence: Any, rank: Any, chunk: Any) -> Any:
        """Where `rank` posts, for a chunk, at that meeting."""
        half = load(plan + WORD * (halves + (sequence & 1) * nranks + rank))
        return half + chunk * load(plan + WORD * SECTION)

    @part
    def copy_in(plan: Any, values: Any, piece: Any, sequence: Any) -> None:
        """Post this rank's values of the chunks that others reduce."""
        frame = load(plan + WORD * FRAME)
        rank = load(frame + WORD * RANK)
        for chunk in range(nranks):
            if chunk != rank:
                begin, end = begin_of(plan, chunk, piece), begin_of(plan, chunk, piece + 1)
                copy(frame, section_of(plan, sequence, rank, chunk), values + begin, end - begin)

    @part
    def copy_out(plan: Any, values: Any, piece: Any, sequence: Any) -> None:
        """The results of other ranks."""
        frame = load(plan + WORD * FRAME)
        for chunk in range(nranks):
            if chunk != load(frame + WORD * RANK):
                begin, end = begin_of(plan, chunk, piece), begin_of(plan, chunk, piece + 1)
                place = section_of(plan, sequence, chunk, chunk)
                if load(plan + WORD * PAST):
                    copy_past_the_cache(frame, values + begin, place, end - begin)
                else:
                    copy(frame, values + begin, place, end - begin)
        if load(plan + WORD * PAST):
            fence()

    @part
    def reduce_piece(plan: Any, values: Any, piece: Any, sequence: Any) -> None:
        """This rank's chunk of it: of what was posted for this meeting, and of sources; posted for the next."""
        rank = load(load(plan + WORD * FRAME) + WORD * RANK)
        begin, end = begin_of(plan, rank, piece), begin_of(plan, rank, piece + 1)
        for k in range(nranks):
            one_by_one()
            other = (rank + 1 + k) % nranks
            source = load(plan + WORD * (sources + other))
            place = source + begin if source else section_of(plan, sequence, other, rank)
            store(plan + WORD * (inputs + k), values + begin if other == rank else place)
        store(plan + WORD * (inputs + nranks), section_of(plan, sequence + 1, rank, rank))
        reduce(addresses(plan + WORD * inputs), (end - begin) // load(plan + WORD * ITEM), plan)

    def staged(plan: Any) -> None:  # a kernel
        frame, values = load(plan + WORD * FRAME), load(load(plan + WORD * ARRAY) + ARRAY_DATA)
        position, found = load(plan + WORD * POSITION), UNFIT
        if position or fits(plan):
            pieces, here = load(plan + WORD * PIECES), load(plan + WORD * HERE)
            if not position:
                if not here:
                    copy_in(plan, values, 0, load(frame + WORD * SEQUENCE) + 1)
                take_note(plan)
                arrive(frame)
                position = 1
            found = wait_for_all(frame)
            while found == MET or (found != LATE and (position > 1 or load(plan + WORD * AGREED))):
                sequence = load(frame + WORD * SEQUENCE)
                if position > 1 and load(plan + WORD * GATHERS):
                    copy_out(plan, values, position - 2, sequence)
                if position > pieces:
                    found = MET
                    break
                if position < pieces and not here:
                    copy_in(plan, values, position, sequence + 1)
                reduce_piece(plan, values, position - 1, sequence)
                position += 1
                arrive(frame)
                found = wait_within(frame)
            store(plan + WORD * POSITION, position if found == LATE else 0)
        store(frame + WORD * RESULT, found)

    return staged


def paired(kernel: Whole) -> Callable[[Any], None]:
    """A plan's tables, from PAIR on: CHUNKS, 3 words; HALVES, 4."""
    chunks, halves = PAIR, PAIR + 3
    into_first, into_second = reducing(kernel, (0,)), reducing(kernel, (1,))
    begin_of = beginning(chunks)

    @part
    def slot_of(plan: Any, sequence: Any, rank: Any, piece: Any) -> Any:
        """Where `rank` posts a piece at that meeting: each half holds PAIR_SLOTS of them."""
        half = load(plan + WORD * (halves + (sequence & 1) * 2 + rank))
        return half + (piece >> 1) % PAIR_SLOTS * load(plan + WORD * SECTION)

    @part
    def copy_in(plan: Any, values: Any, piece: Any, sequence: Any) -> None:
        frame, each = load(plan + WORD * FRAME), load(plan + WORD * EACH)
        begin, end = begin_of(plan, piece // each, piece % each), begin_of(plan, piece // each, piece % each + 1)
        place = slot_of(plan, sequence, load(frame + WORD * RANK), piece)
        copy(frame, place, values + begin, end - begin)

    @part
    def reduce_piece(plan: Any, values: Any, piece: Any, sequence: Any) -> None:
        """Of what was posted for this meeting, in canonical order."""
        rank, each = load(load(plan + WORD * FRAME) + WORD * RANK), load(plan + WORD * EACH)
        begin, end = begin_of(plan, piece // each, piece % each), begin_of(plan, piece // each, piece % each + 1)
        mine, theirs = values + begin, slot_of(plan, sequence, 1 - rank, piece)
        count = (end - begin) // load(plan + WORD * ELEMENT)
        if piece // each == rank:
            into_second((theirs, mine), count, plan)
        else:
            into_first((mine, theirs), count, plan)

    def paired(plan: Any) -> None:  # a kernel
        frame, values = load(plan + WORD * FRAME), load(load(plan + WORD * ARRAY) + ARRAY_DATA)
        position, found = load(plan + WORD * POSITION), UNFIT
        if position or fits(plan):
            pieces = load(plan + WORD * ALL)
            if not position:
                copy_in(plan, values, 0, load(frame + WORD * SEQUENCE) + 1)
                take_note(plan)
                arrive(frame)
                position = 1
            found = wait_for_all(frame)
            while found == MET or (found != LATE and position > 1):
                sequence, early = load(frame + WORD * SEQUENCE), position + 1 < pieces
                if position < pieces:
                    copy_in(plan, values, position, sequence + 1)
                if early:
                    arrive(frame)
                reduce_piece(plan, values, position - 1, sequence)
                if position == pieces:
                    found = MET
                    break
                if not early:
                    arrive(frame)
                position += 1
                found = wait_within(frame)
            store(plan + WORD * POSITION, position if found == LATE else 0)
        store(frame + WORD * RESULT, found)

    return paired
