"""Memory: malloc tuned for large tensors, aligned private buffers, and shared segments without names."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import secrets
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import SharedMemoryTooSmall

__all__ = [
    "ALIGNMENT_BYTES",
    "Segment",
    "SegmentPool",
    "Unreachable",
    "aligned_empty",
    "give_memory_back",
    "limit_malloc_arenas",
    "segment_name",
    "trim_malloc",
    "tune_malloc",
]

ALIGNMENT_BYTES = 64  # a cache line; every arena base and every parameter in it starts on one
HUGE_PAGE = 1 << 21  # bytes; of x86-64, and of arm64 with pages of 4 KiB
MAP_FIXED, MADV_COLLAPSE = 0x10, 25  # mman.h; Python's mmap module does not have them
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # of every segment: its size stays as it is
F_SEAL_EXEC = 0x20  # fcntl.h, which some systems set on every memfd (Linux 6.3)
KEY_BYTES = 16

CGROUPS = (  # versions 2 and 1
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_ssize_t
libc.mmap.argtypes = [ctypes.c_ssize_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def tune_malloc() -> None:
    """Keep freed large blocks instead of returning them to the kernel, whose page faults dominate large CPU
    operations (25M-parameter MLP, forward and backward: 74 -> 41 ms). Call before any large allocation."""
    m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
    libc.mallopt(m_mmap_threshold, 1 << 30)
    libc.mallopt(m_trim_threshold, (1 << 31) - 1)


def give_memory_back() -> None:
    """Collect garbage, for a model is part of cycles, and return to the kernel what `tune_malloc` has kept."""
    gc.collect()
    trim_malloc()


def trim_malloc() -> None:
    """Return what is freed, and `tune_malloc` has kept, to the kernel."""
    libc.malloc_trim(0)


def limit_malloc_arenas(count: int) -> None:
    """Have all threads allocate from so many arenas, not from 8 for each core: what was freed in one is not used for
    another. Call before there are threads."""
    m_arena_max = -8  # malloc.h
    libc.mallopt(m_arena_max, count)


def aligned_empty(count: int, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """An uninitialised private 1-D array of `count` elements whose first byte is 64-byte aligned."""
    kind = np.dtype(dtype)
    raw = np.empty(count * kind.itemsize + ALIGNMENT_BYTES, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[skip : skip + count * kind.itemsize].view(kind)


class Unreachable(Exception):
    """Why another process's memory cannot be mapped, in words."""


class Segment:
    """A piece of memory that several processes map: a `memfd`, known only by its descriptor.

    Having no name, it needs no reclaiming: the kernel frees it with the last process that maps it, also
    after `kill -9`, and the size of /dev/shm does not limit it. Its pages are reserved when it is created, so
    that too little memory is an error here and not a SIGBUS later. Nobody can change its size.

    Args:
        descriptor: of a segment of another process, which is closed with this one.
        key: by which the processes that were handed it know it.

    Raises:
        SharedMemoryTooSmall: naming the bytes needed and the bytes free.
        Unreachable: the descriptor, closed now, is not that of a segment of so many bytes.
    """

    def __init__(self, nbytes: int, *, descriptor: int | None = None, key: bytes = b"") -> None:
        self.nbytes = nbytes
        self.key = key or secrets.token_bytes(KEY_BYTES)
        self.descriptor = create_memfd(nbytes) if descriptor is None else checked(descriptor, nbytes)
        aligned_to = HUGE_PAGE if nbytes >= HUGE_PAGE else 1
        reserved = mmap.mmap(-1, max(nbytes, 1) + aligned_to - 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(reserved, np.uint8)  # given back with the last array that views it
        skip = -whole.ctypes.data % aligned_to
        self.bytes: npt.NDArray[np.uint8] = whole[skip : skip + nbytes]
        self.address: int = whole.ctypes.data + skip
        self.lay_over(self.address)
        if descriptor is None:
            self._use_huge_pages()

    def array(self, start: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """`count` elements starting at byte `start`, as a view that keeps the mapping alive."""
        kind = np.dtype(dtype)
        return self.bytes[start : start + count * kind.itemsize].view(kind)

    def offset_of(self, array: npt.NDArray[Any]) -> int | None:
        """Where `array` (contiguous) lies in this segment, in bytes; None if it lies elsewhere."""
        offset = array.ctypes.data - self.address
        return offset if offset >= 0 and offset + array.nbytes <= self.nbytes else None

    def lay_over(self, address: int, *, private: bool = False) -> None:
        """Map this segment at `address`, where another one of the same size is mapped: what views that one's memory
        views this one's from now on.

        Args:
            private: what this process writes there from now on is its own.
        """
        visibility = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        found = libc.mmap(
            address, max(self.nbytes, 1), mmap.PROT_READ | mmap.PROT_WRITE, visibility | MAP_FIXED, self.descriptor, 0
        )
        if found != address:
            raise OSError(ctypes.get_errno(), "mmap")

    def _use_huge_pages(self) -> None:
        """Whatever the system's setting for shared memory, where the kernel can (Linux 6.1). Other processes that map
        the segment have them too. In a virtual machine, where looking a page up takes two tables, adding up 100 MB went
        from between 45 and 350 ms to 12."""
        if self.nbytes >= HUGE_PAGE:
            libc.madvise(self.address, self.nbytes // HUGE_PAGE * HUGE_PAGE, MADV_COLLAPSE)

    def close(self) -> None:
        """Give the descriptor back. The memory goes with the last array that views it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SegmentPool:
    """The segments that one process has made, numbered in the order of creation; it knows which an array lies in."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._by_address: list[tuple[int, int]] = []  # (address, number), sorted

    def create(self, nbytes: int) -> Segment:
        """A new segment.

        Raises:
            SharedMemoryTooSmall: the machine has not so much memory free.
        """
        segment = Segment(nbytes)
        self._by_address.append((segment.address, len(self.segments)))
        self._by_address.sort()
        self.segments.append(segment)
        return segment

    def empty(self, count: int, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """An uninitialised 1-D array in a segment of its own."""
        return self.create(count * np.dtype(dtype).itemsize).array(0, count, dtype)

    def locate(self, array: npt.NDArray[Any]) -> tuple[int, int] | None:
        """(segment number, offset in bytes) of a contiguous array in one of the segments; None elsewhere."""
        if not array.size:
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # half the time of array.ctypes.data
        at = bisect_right(self._by_address, (address, len(self.segments))) - 1
        if at < 0:
            return None
        start, number = self._by_address[at]
        offset = address - start
        return (number, offset) if offset + array.nbytes <= self.segments[number].nbytes else None

    def forget(self, number: int) -> None:
        """Have `locate` no longer find arrays in this segment."""
        self._by_address.remove((self.segments[number].address, number))

    def close(self) -> None:
        """Give all descriptors back; arrays that are still used keep their memory."""
        for segment in self.segments:
            segment.close()


def segment_name(pid: int) -> str:
    """What the segments that a process has made are called in the maps of all processes; no name to find them by."""
    return f"gradsync-{pid}"


def create_memfd(nbytes: int) -> int:
    free = free_bytes()
    if nbytes > free:
        raise SharedMemoryTooSmall(shortage(nbytes, free))
    descriptor = os.memfd_create(segment_name(os.getpid()), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, max(nbytes, 1))
    except OSError as exc:
        os.close(descriptor)
        raise SharedMemoryTooSmall(shortage(nbytes, free)) from exc
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def checked(descriptor: int, nbytes: int) -> int:
    """A descriptor from another process, if it is that of such a memfd: no file, which would be read and written with
    this process's rights, and nothing that can shrink, which would end this process by SIGBUS."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & ~F_SEAL_EXEC  # files and O_PATH descriptors have none
        writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    except OSError:
        seals, writable = 0, False
    size = os.fstat(descriptor).st_size
    if seals == SEALS and writable and size == max(nbytes, 1):
        return descriptor
    os.close(descriptor)
    if seals == SEALS and writable:
        raise Unreachable(f"a memory of {size:,} bytes was handed over as one of {nbytes:,}")
    raise Unreachable("what was handed over is not a memory of fixed size")


def shortage(needed: int, free: int) -> str:
    return (
        f"shared memory too small: {needed:,} bytes needed, {free:,} free; "
        "use a smaller model, fewer ranks on this host, or --backend tcp (of servers: --data-plane grpc)"
    )


def free_bytes() -> int:
    """What this process may still use: the machine's available memory, or less under a container's limit."""
    return memory_bytes()[0]


def memory_bytes() -> tuple[int, int]:
    """(what may still be used, what there is in all): of the machine, or of a container with a limit, where what the
    kernel only caches counts as free."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(meminfo[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    for folder, limit_file, used_file, cached in CGROUPS:
        with suppress(OSError, ValueError, KeyError):  # another version, or no limit
            limit, used = (int((folder / name).read_text()) for name in (limit_file, used_file))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free, total = min(free, limit - used + int(stat[cached])), min(total, limit)
    return max(0, free), total
