"""Meetings as one call of machine code (common/kernels/meeting.py), and short arrays' whole reduction likewise."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

from collective.membership.liveness import Mesh
from collective.shared_memory.meetings.base import LINE_BYTES, NOTE_BYTES, SLICE_S, Control, Lines, Meetings
from common.kernels.layout import DIFFERENT, LATE, NOTE, NUMBER, RESULT, SEMAPHORES, SEQUENCE, SPINS, WORD, YIELDS
from common.kernels.loader import meeting_kernels

__all__ = ["CompiledMeetings", "can_be_compiled"]

SPIN, YIELD = 200, 40  # how often: some 10 us and 30 us, about what sleeping and waking costs
CROWDED_SPIN = 10  # with more ranks than cores: the one waited for may need this core

libc = ctypes.CDLL(None)


def can_be_compiled() -> bool:
    """Whether this rank has the machine code, compiled if need be."""
    return meeting_kernels(0) is not None


def address_of(library_function: object) -> int:
    """Of a C function."""
    found: int = ctypes.cast(library_function, ctypes.c_void_p).value  # type: ignore[arg-type, assignment]
    return found


class CompiledMeetings(Meetings):
    """
    Args:
        everyone: whose semaphores 0 the ranks sleep at.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[int], rank: int, everyone: Sequence[Control], lines: Lines) -> None:
        super().__init__(mesh, ranks, rank)
        self._lines, self._everyone = lines, everyone  # the frame has addresses in their memory
        self._semaphore = everyone[rank].arrived[0]
        crowded = len(ranks) > len(os.sched_getaffinity(0))
        words = [0, 0, CROWDED_SPIN if crowded else SPIN, YIELD, rank, len(ranks)]
        words += [lines.halves[0].ctypes.data, lines.sleepers.ctypes.data]
        words += map(address_of, (libc.sched_yield, libc.sem_post, libc.memcpy))
        words += [0] * (SEMAPHORES - NOTE) + [control.arrived[0].address for control in everyone]
        self.frame = (ctypes.c_int64 * len(words))(*words)
        self._note = memoryview(self.frame).cast("B")[WORD * NOTE :][:NOTE_BYTES]
        kernels = meeting_kernels(ctypes.addressof(self.frame))
        assert kernels, "a rank that has none has said so"
        self._meet, self._wait, self._asleep, self._awake = kernels

    @property
    def turn(self) -> int:
        return 1 - (self.frame[SEQUENCE] & 1)

    def exchange(self, note: bytes) -> Sequence[bytes] | None:
        self._note[:] = note
        self.meet()
        return self.notes() if self.frame[RESULT] == DIFFERENT else None

    def meet(self) -> None:
        self._meet()
        if self.frame[RESULT] == LATE:
            self.wait_longer(self._wait)

    def wait_longer(self, again: Callable[[], object]) -> None:
        """When a kernel came to LATE, until calling it again it does not."""

        def arrived() -> bool:
            if self.frame[RESULT] == LATE:
                again()
            return bool(self.frame[RESULT] != LATE)

        self._asleep()
        self._semaphore.drain()  # of those who came before it slept: each would wake it once
        try:
            if not arrived():
                self._semaphore.sleep(SLICE_S)
            if not arrived():
                spins, yields = self.frame[SPINS], self.frame[YIELDS]
                self.frame[SPINS] = self.frame[YIELDS] = 0  # it has slept: others may need the core
                try:
                    with self._mesh.alarming(self._semaphore.post):
                        self._wait_longer(arrived, self._semaphore.sleep)
                finally:
                    self.frame[SPINS], self.frame[YIELDS] = spins, yields
        finally:
            self._awake()

    def notes(self) -> list[bytes]:
        """Of all ranks, at the last meeting."""
        everyones = self._lines.halves[1 - self.turn].tobytes()
        return [everyones[at : at + NOTE_BYTES] for at in range(0, len(everyones), LINE_BYTES)]

    def _late(self) -> list[int]:
        numbers = self._lines.halves[1 - self.turn].view("uint64")[NUMBER :: LINE_BYTES // 8]
        return [r for r in self._others if numbers[r] != self.frame[SEQUENCE]]
