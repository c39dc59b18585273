"""How ranks of one host meet: what collective/shared_memory does in one call.

Every rank has two lines of 64 bytes that all can see, used in turn: a note of 6 words, an unused word, and at how many
meetings it has posted. Another line says whether it sleeps.

    arrive   write the note | store the number, release | fence | wake those who sleep
    wait     for each rank: load its number, acquire, until it is this meeting's | compare the notes

A rank that has waited long goes to sleep: it says so, fences, looks once more, and waits at its semaphore. So either it
sees the number, or the one who comes sees that it sleeps (the two fences allow no third case). What a rank wrote
anywhere before a meeting is seen by all after it, since each has read the other's number with acquire.

Two lines are enough: a rank writes its line for meeting k+2 after meeting k+1, to which each came when it had read all
lines of meeting k.

Kernels are called with the address of a table (layout.py).
"""

from __future__ import annotations

from typing import Any

from common.kernels.intrinsics import (
    call,
    call_1,
    fence,
    load,
    load_acquire,
    load_int,
    one_by_one,
    part,
    pause,
    store,
    store_release,
)
from common.kernels.layout import (
    ARRAY,
    ARRAY_DTYPE,
    ARRAY_FLAGS,
    ARRAY_GOOD,
    ARRAY_NDIM,
    ARRAY_SHAPE,
    DIFFERENT,
    DTYPE,
    FRAME,
    KIND,
    LABEL,
    LATE,
    LINE_BYTES,
    LINES,
    MET,
    NBYTES,
    NOTE,
    NOTE_WORDS,
    NRANKS,
    NUMBER,
    RANK,
    RESULT,
    SCHED_YIELD,
    SEM_POST,
    SEMAPHORES,
    SEQUENCE,
    SIZE,
    SLEEPERS,
    SPINS,
    STEP,
    WORD,
    YIELDS,
)

__all__ = [
    "arrive",
    "asleep",
    "awake",
    "elements_of",
    "fits",
    "meet",
    "take_note",
    "wait",
    "wait_for_all",
    "wait_within",
]

YIELDS_WITHIN = 1200  # some 0.4 ms


@part
def line_of(frame: Any, sequence: Any, rank: Any) -> Any:
    return load(frame + WORD * LINES) + LINE_BYTES * ((sequence & 1) * load(frame + WORD * NRANKS) + rank)


@part
def arrive(frame: Any) -> None:
    """Be counted as come to the next meeting, with the frame's note, and wake who sleeps."""
    sequence, rank, nranks = load(frame + WORD * SEQUENCE) + 1, load(frame + WORD * RANK), load(frame + WORD * NRANKS)
    line = line_of(frame, sequence, rank)
    for word in range(NOTE_WORDS):
        store(line + WORD * word, load(frame + WORD * (NOTE + word)))
    store(frame + WORD * SEQUENCE, sequence)
    store_release(line + WORD * NUMBER, sequence)
    fence()
    for other in range(nranks):
        if other != rank and load_acquire(load(frame + WORD * SLEEPERS) + LINE_BYTES * other):
            call_1(load(frame + WORD * SEM_POST), load(frame + WORD * (SEMAPHORES + other)))


@part
def wait_for_all(frame: Any) -> Any:
    """For all ranks to come to this meeting: MET, DIFFERENT if the notes are, or LATE."""
    return wait_until_all(frame, load(frame + WORD * YIELDS))


@part
def wait_within(frame: Any) -> Any:
    """Likewise, where all ranks are in this call, so that each comes within the time that a piece takes: sleeping and
    waking would take longer."""
    return wait_until_all(frame, YIELDS_WITHIN)


@part
def wait_until_all(frame: Any, yields: Any) -> Any:
    sequence, spins = load(frame + WORD * SEQUENCE), load(frame + WORD * SPINS)
    tries, found = 0, MET
    for other in range(load(frame + WORD * NRANKS)):
        theirs = line_of(frame, sequence, other)
        while load_acquire(theirs + WORD * NUMBER) != sequence:
            tries += 1
            if tries <= spins:
                pause()
            elif tries <= spins + yields:
                call(load(frame + WORD * SCHED_YIELD))
            else:
                return LATE
        for word in range(NOTE_WORDS):
            if load(theirs + WORD * word) != load(frame + WORD * (NOTE + word)):
                found = DIFFERENT
    return found


@part
def elements_of(array: Any) -> Any:
    elements = 1
    for axis in range(load_int(array + ARRAY_NDIM)):
        one_by_one()
        elements *= load(load(array + ARRAY_SHAPE) + WORD * axis)
    return elements


@part
def fits(plan: Any) -> Any:
    """Whether the array is of the plan's size and dtype, and its memory as it must be."""
    array = load(plan + WORD * ARRAY)
    return (
        elements_of(array) == load(plan + WORD * SIZE)
        and load(array + ARRAY_DTYPE) == load(plan + WORD * DTYPE)
        and load_int(array + ARRAY_FLAGS) & ARRAY_GOOD == ARRAY_GOOD
    )


@part
def take_note(plan: Any) -> None:
    """Write the note of a plan's call, whose array has no place."""
    note = load(plan + WORD * FRAME) + WORD * NOTE
    store(note, load(plan + WORD * STEP))
    store(note + WORD, load(plan + WORD * LABEL))
    store(note + WORD * 2, load(plan + WORD * KIND))
    store(note + WORD * 3, load(plan + WORD * NBYTES))
    store(note + WORD * 4, 0)
    store(note + WORD * 5, 0)


def meet(frame: Any) -> None:  # a kernel
    """Arrive with the frame's note and wait."""
    arrive(frame)
    store(frame + WORD * RESULT, wait_for_all(frame))


def wait(frame: Any) -> None:  # a kernel
    """For who has arrived: once more."""
    store(frame + WORD * RESULT, wait_for_all(frame))


def asleep(frame: Any) -> None:  # a kernel
    """Tell that this rank is about to sleep, before it looks once more."""
    store_release(load(frame + WORD * SLEEPERS) + LINE_BYTES * load(frame + WORD * RANK), 1)
    fence()


def awake(frame: Any) -> None:  # a kernel
    """Tell that it does not sleep any more."""
    store_release(load(frame + WORD * SLEEPERS) + LINE_BYTES * load(frame + WORD * RANK), 0)
