"""Counting semaphores of the C library inside shared memory, between processes.

They order memory as well as time: what a process wrote before `post` is seen by the one whose `wait` took that
post (POSIX.1-2017, 4.12 Memory Synchronization), on x86-64 and arm64 alike. Only x86-64 was tested.
"""

from __future__ import annotations

import ctypes
import errno
import time
from functools import partial

from common.system.memory import Segment

__all__ = ["SEMAPHORE_BYTES", "Semaphore"]

SEMAPHORE_BYTES = 64  # sem_t is 32 bytes on 64-bit Linux; a cache line each keeps neighbours apart
SPIN_S = 30e-6  # about what sleeping and waking costs; longer would steal the core from a slower rank

libc = ctypes.CDLL(None, use_errno=True)
brief = ctypes.PyDLL(None)  # for calls that cannot block: without handing Python's lock over, half the time
MONOTONIC = 1  # CLOCK_MONOTONIC
HAS_CLOCKWAIT = hasattr(libc, "sem_clockwait")  # since glibc 2.30; before it a changed wall clock disturbs waits


class Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Semaphore:
    """The semaphore at byte `offset` of a segment; `create` initialises it to zero, once, by one process."""

    def __init__(self, segment: Segment, offset: int, *, create: bool = False) -> None:
        self._segment = segment  # keeps the mapping alive
        self.address = segment.address + offset
        self._pointer = ctypes.c_void_p(self.address)
        self.post = partial(brief.sem_post, self._pointer)
        self.missed = partial(brief.sem_trywait, self._pointer)  # takes a post; false (0) if there was one
        if create and libc.sem_init(self._pointer, 1, 0):
            raise OSError(ctypes.get_errno(), "sem_init")

    def drain(self) -> None:
        """Take all posts that there are."""
        while not self.missed():
            pass

    def wait(self, seconds: float) -> bool:
        """Take one post: look and yield for SPIN_S, then sleep in the kernel; False if none came within `seconds`."""
        if not self.missed():
            return True
        spin_until = time.perf_counter() + SPIN_S
        while time.perf_counter() < spin_until:
            libc.sched_yield()  # without Python's lock, which another thread may need: os.sched_yield keeps it
            if not self.missed():
                return True
        return self.sleep(seconds)

    def sleep(self, seconds: float) -> bool:
        """As `wait`, without looking first: if more processes run than there are cores, a yield may cost the core."""
        until = (time.monotonic() if HAS_CLOCKWAIT else time.time()) + seconds
        deadline = ctypes.byref(Timespec(int(until), int(until % 1 * 1e9)))
        while (
            libc.sem_clockwait(self._pointer, MONOTONIC, deadline)
            if HAS_CLOCKWAIT
            else libc.sem_timedwait(self._pointer, deadline)
        ):
            code = ctypes.get_errno()
            if code == errno.ETIMEDOUT:
                return False
            if code != errno.EINTR:
                raise OSError(code, "sem_clockwait")
        return True
