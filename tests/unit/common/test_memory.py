"""Aligned buffers, segments that processes share by descriptor, and malloc's thresholds."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.errors import SharedMemoryTooSmall
from common.system.memory import Segment, aligned_empty, memory_bytes, tune_malloc

TOO_MUCH = 1 << 60
READ_AND_ADD = """
import sys, numpy as np
from common.system.memory import Segment
with Segment(int(sys.argv[2]), descriptor=int(sys.argv[1])) as segment:
    array = segment.array(64, 97, "float32")
    print(array.tobytes().hex())
    array += 1000
"""


class Mallinfo2(ctypes.Structure):
    """glibc 2.33, malloc.h: ten sizes, the fifth of which is the bytes in blocks mapped one by one."""

    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(4)]
    _fields_ += [("hblkhd", ctypes.c_size_t), *((f"field{i}", ctypes.c_size_t) for i in range(5, 10))]


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "int16"])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 7919])
def test_aligned_empty(count: int, dtype: str) -> None:
    arrays = [aligned_empty(count, dtype) for _ in range(5)]  # malloc's own alignment differs between them
    for i, array in enumerate(arrays):
        assert (array.shape, array.dtype) == ((count,), np.dtype(dtype))
        assert count == 0 or array.ctypes.data % 64 == 0  # NumPy gives empty arrays any address
        array[...] = i
    assert all((array == i).all() for i, array in enumerate(arrays))


def test_aligned_empty_is_float32_by_default() -> None:
    assert aligned_empty(3).dtype == np.float32


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 100_003])
def test_a_new_segment_is_zero_and_page_aligned(nbytes: int) -> None:
    with Segment(nbytes) as segment:
        array = segment.array(0, nbytes, np.uint8)
        assert array.shape == (nbytes,)
        assert not array.any()
        assert segment.address % 4096 == 0


def test_two_mappings_of_one_descriptor_are_one_memory() -> None:
    with Segment(4096) as first, Segment(4096, descriptor=os.dup(first.descriptor)) as second:
        first.array(0, 1024, "float32")[...] = np.arange(1024)
        np.testing.assert_array_equal(second.array(0, 1024, "float32"), np.arange(1024))
        second.array(400, 3, "float32")[...] = -1
        assert first.array(0, 1024, "float32")[98:105].tolist() == [98, 99, -1, -1, -1, 103, 104]
        assert first.address != second.address


@pytest.mark.processes
def test_another_process_sees_and_changes_it() -> None:
    values = np.arange(97, dtype=np.float32) / 7
    with Segment(1000) as segment:
        shared = segment.array(64, 97, "float32")
        shared[...] = values
        done = subprocess.run(
            [sys.executable, "-c", READ_AND_ADD, str(segment.descriptor), "1000"],
            pass_fds=[segment.descriptor],
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.strip() == values.tobytes().hex()
    np.testing.assert_array_equal(shared, values + np.float32(1000))


@pytest.mark.processes
def test_a_descriptor_is_not_inherited_unasked() -> None:
    with Segment(16) as segment:
        code = f"import os; os.fstat({segment.descriptor})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, close_fds=False)
    assert "Bad file descriptor" in done.stderr


def test_close_gives_the_descriptor_back_and_keeps_the_memory() -> None:
    segment = Segment(64)
    array, descriptor = segment.array(0, 16, "float32"), segment.descriptor
    array[...] = np.arange(16)
    segment.close()
    assert segment.descriptor == -1
    assert not is_open(descriptor)
    del segment
    gc.collect()
    np.testing.assert_array_equal(array, np.arange(16))


def test_close_again_leaves_other_descriptors_alone() -> None:
    segment = Segment(64)
    descriptor = segment.descriptor
    segment.close()
    reader, writer = os.pipe()  # takes the lowest number that is free
    assert descriptor in (reader, writer)
    segment.close()
    assert is_open(descriptor)
    os.close(reader)
    os.close(writer)


def test_memory_goes_with_the_last_view() -> None:
    segment = Segment(1 << 20)
    inode = os.fstat(segment.descriptor).st_ino
    view = segment.array(0, 4, "float32")
    segment.close()
    del segment
    gc.collect()
    assert mappings_of(inode) == 1
    del view
    gc.collect()
    assert mappings_of(inode) == 0


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def mappings_of(inode: int) -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:gradsync" in line and line.split()[4] == str(inode) for line in maps)


def test_offset_of() -> None:
    with Segment(256) as segment, Segment(256) as other:
        assert segment.offset_of(segment.array(0, 64, "float32")) == 0
        assert segment.offset_of(segment.array(64, 48, "float32")) == 64
        assert segment.offset_of(segment.array(64, 16, "float32")[3:]) == 76
        assert segment.offset_of(segment.array(252, 1, "float32")) == 252
        assert segment.offset_of(other.array(0, 1, "float32")) is None
        assert other.offset_of(segment.array(0, 1, "float32")) is None  # one of the two lies above
        assert segment.offset_of(np.zeros(4, np.float32)) is None


def test_too_large_a_segment_says_what_is_needed_and_what_is_free() -> None:
    with pytest.raises(SharedMemoryTooSmall) as caught:
        Segment(TOO_MUCH)
    found = re.match(r"shared memory too small: ([\d,]+) bytes needed, ([\d,]+) free; ", str(caught.value))
    assert found, str(caught.value)
    needed, free = (int(number.replace(",", "")) for number in found.groups())
    assert needed == TOO_MUCH
    assert 1 << 20 < free < 1 << 50


def test_pages_that_cannot_be_reserved_are_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def refuse(descriptor: int, offset: int, length: int) -> None:
        asked.append((descriptor, offset, length))
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(SharedMemoryTooSmall, match=r"5,000 bytes needed, [1-9][0-9,]+ free"):
        Segment(5000)
    assert [call[1:] for call in asked] == [(0, 5000)]
    assert not is_open(asked[0][0])


def test_a_container_limit_counts_as_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n",
        "/sys/fs/cgroup/memory.max": "3000000\n",
        "/sys/fs/cgroup/memory.current": "1500000\n",
        "/sys/fs/cgroup/memory.stat": "anon 1000000\ninactive_file 500000\n",
    }

    def read_text(path: Path) -> str:
        if str(path) not in texts:
            raise FileNotFoundError(path)
        return texts[str(path)]

    monkeypatch.setattr("common.system.memory.Path.read_text", read_text)
    assert memory_bytes() == (2_000_000, 3_000_000)
    with pytest.raises(SharedMemoryTooSmall, match="2,000,001 bytes needed, 2,000,000 free"):
        Segment(2_000_001)
    texts["/sys/fs/cgroup/memory.max"] = "max\n"
    assert memory_bytes() == (5_120_000, 9_216_000)
    with pytest.raises(SharedMemoryTooSmall, match="5,120,001 bytes needed, 5,120,000 free"):
        Segment(5_120_001)
    old = "/sys/fs/cgroup/memory/memory"
    texts |= {f"{old}.limit_in_bytes": "4000000", f"{old}.usage_in_bytes": "4500000"}
    texts[f"{old}.stat"] = "total_inactive_file 100000"
    assert memory_bytes() == (0, 4_000_000)
    texts[f"{old}.limit_in_bytes"] = str(1 << 62)  # none
    assert memory_bytes() == (5_120_000, 9_216_000)


def test_large_blocks_are_not_mapped_one_by_one() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("this libc has no mallinfo2")
    libc.mallinfo2.restype = Mallinfo2
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    tune_malloc()
    before = libc.mallinfo2().hblkhd
    block = libc.malloc(ctypes.c_size_t(64_000_000))
    mapped = libc.mallinfo2().hblkhd - before
    libc.free(block)
    assert mapped == 0


def test_large_segments_have_huge_pages_where_the_kernel_can() -> None:
    """For the process that made one and for another that maps it."""

    def huge_kib(segment: Segment) -> int:
        begun = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            begun = line.startswith(f"{segment.address:x}-") or (begun and not re.match(r"[0-9a-f]+-[0-9a-f]+ ", line))
            if begun and line.startswith("ShmemPmdMapped:"):
                return int(line.split()[1])
        return 0

    release = tuple(int(n) for n in os.uname().release.split("-")[0].split(".")[:2])
    if release < (6, 1) or not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip(f"Linux {os.uname().release} does not make huge pages when asked to")
    with Segment(5 << 20) as segment, Segment(1 << 20) as small:
        assert segment.address % (2 << 20) == 0
        segment.bytes[...] = 7
        if not huge_kib(segment):
            pytest.skip("this kernel has no huge pages to give")
        assert huge_kib(segment) == 4096
        assert huge_kib(small) == 0
        with Segment(5 << 20, descriptor=os.dup(segment.descriptor)) as again:
            assert again.bytes.sum() == 7 * (5 << 20)
            assert huge_kib(again) == 4096
