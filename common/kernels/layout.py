"""Where kernels find what they need, in words of 8 bytes. Three tables for each rank:

frame   one for a group          the meetings: sequence and waits, the lines, the sleepers, C functions, semaphores
plan    one for a kind of array  what to do with it; what is done now
known   one for a group          the plans of short all-reduces that there were (repeat.py); C functions of Python
"""

from __future__ import annotations

__all__: list[str] = []

WORD = 8  # bytes
LINE_BYTES = 64  # a cache line, so that ranks do not disturb each other
ROW_BYTES, SEEN_BYTES = 1024, 32  # of mix_rows.py
NOTE_WORDS = 6
NUMBER = 7  # word of a line: at how many meetings its owner has posted

# Words of a frame. RESULT: what a kernel came to. NOTE: 6 words, of the coming meeting. SPINS: how often to look, with
# a pause between; YIELDS: then how often, giving the core away. SEMAPHORES: the first of N words, one for each rank.
RESULT, SEQUENCE, SPINS, YIELDS, RANK, NRANKS, LINES, SLEEPERS, SCHED_YIELD, SEM_POST, MEMCPY, NOTE = range(12)
SEMAPHORES = NOTE + NOTE_WORDS

# Words of a plan. ARRAY: the `id` of the array; STEP, LABEL: the note's first words; POSITION: how far this call has
# come, 0 before it has arrived; all these for each call. KIND, NBYTES: the note's next words. DTYPE, SIZE: what the
# array must be. FACTOR: of a mean, in the array's dtype. RUN: the code of the plan's kernel.
FRAME, ARRAY, STEP, LABEL, POSITION, KIND, NBYTES, DTYPE, SIZE, FACTOR, RUN = range(11)
# Of short arrays: AREAS of even and odd meetings, where terms are posted, APART bytes from each other; FIRST and COUNT,
# the byte and the number of elements that are wanted; SHORT_CHUNKS, N + 1 words, where chunks begin and the last ends.
AREAS, APART, FIRST, COUNT, SHORT_CHUNKS = 11, 13, 14, 15, 16
# Of staged ones: SECTION, bytes of a half for a chunk's part of a piece; PIECES, how many; GATHERS, whether results of
# other chunks are wanted; ITEM, bytes of an element; HERE, whether others read this rank's array where it lies; AGREED,
# whether places are known, so that notes may differ; PAST, whether results are copied out past the cache. Then TABLES:
# N + 1 words, where chunks begin and the last ends; N, every rank's array, or 0 if it does not lie in shared memory;
# 2 N, every rank's half of even, then of odd meetings; N + 1 for the kernel itself.
SECTION, PIECES, GATHERS, ITEM, HERE, AGREED, PAST, TABLES = 11, 12, 13, 14, 15, 16, 17, 18
# Of paired ones: SECTION, bytes of a piece; ALL, how many pieces; EACH, of a chunk; ELEMENT, bytes of one. Then PAIR: 3
# words, where the two chunks begin and the last ends; 4, both ranks' halves of even, then of odd meetings. Each half
# holds PAIR_SLOTS pieces.
ALL, EACH, ELEMENT, PAIR = 12, 13, 14, 15
PAIR_SLOTS = 8
# Of placed ones: PLACE, the note's last 2 words; ELEMENTS, of this rank's chunk. Then ORDER: N words, where that lies
# in all ranks' arrays, in canonical order.
PLACE, ELEMENTS, ORDER = 11, 13, 14

# Words of what is known. PLAN: the last one that was carried out. ARRAY_TYPE: the `id` of NumPy's. FINISH: that of
# what is called when the ranks had not met, or differed. Then C functions; and from PLANS on SLOTS pairs of the `id` of
# an op and the plan for it, or 0.
PLAN, ARRAY_TYPE, FINISH, TO_BOOL, TO_NUMBER, CLEAR_ERROR, RELEASE_GIL, TAKE_GIL, CALL, PLANS = range(10)
SLOTS = 64

MET, DIFFERENT, LATE, UNFIT = range(4)  # what a kernel comes to; UNFIT: the array is not as planned, nothing was done

# An object, and that of a NumPy array (PyArrayObject_fields, the same since NumPy 1.7), in bytes; Python is CPython.
OBJECT_TYPE = 8
ARRAY_DATA, ARRAY_NDIM, ARRAY_SHAPE, ARRAY_DTYPE, ARRAY_FLAGS = 16, 24, 32, 56, 64
ARRAY_GOOD = 0x0001 | 0x0100 | 0x0400  # C-contiguous, aligned, writeable


def slot_of(op: int, dtype: int, size: int) -> int:
    """Of the plan for an array, by the `id` of op and dtype, in words from PLANS on."""
    return 2 * ((op >> 4 ^ dtype >> 4 ^ size ^ size >> 6) % SLOTS)
