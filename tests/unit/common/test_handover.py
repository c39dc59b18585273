"""Memory handed from process to process: sealed segments only, between processes of one user only."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from common.network.gradsync_pb2 import Memory, Place
from common.system.handover import LABEL, Link, check_user
from common.system.memory import SEALS, Segment, SegmentPool, Unreachable
from ps.planes.shared_memory import Desk, OthersMemory, memory_of, place_of

NO_MEMORY = "what was handed over is not a memory of fixed size"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with first, second:
        yield first, second


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_given_is_taken_once_by_its_key_and_is_the_same_memory(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    with Segment(4000) as mine, Link(ends[0]) as giver, Link(ends[1]) as taker:
        assert list(taker.taken()) == []
        giver.give(mine)
        giver.give(mine)
        ((key, descriptor, nbytes),) = taker.taken()
        assert (key, nbytes) == (mine.key, 4000)
        assert not os.get_inheritable(descriptor)
        with Segment(nbytes, descriptor=descriptor, key=key) as theirs:
            mine.array(0, 1000, "float32")[...] = np.arange(1000)
            np.testing.assert_array_equal(theirs.array(0, 1000, "float32"), np.arange(1000))


def test_nobody_can_resize_a_segment() -> None:
    with Segment(100) as segment:
        for size in (0, 99, 101):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.descriptor, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(segment.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def sealed(seals: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 64)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def read_only() -> int:
    writable = sealed(SEALS)
    descriptor = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY)
    os.close(writable)
    return descriptor


def file_at(path: Path, flags: int = os.O_RDWR) -> int:
    path.write_bytes(b"secret".ljust(64))
    return os.open(path, flags)


def tmpfs_file(folder: Path) -> int:
    """Of a file system that is memory too, and knows seals."""
    path = Path("/dev/shm") / f"test-{os.getpid()}-{folder.name}"
    descriptor = file_at(path)
    path.unlink()
    return descriptor


WRONG: dict[str, Callable[[Path], int]] = {
    "a file": lambda folder: file_at(folder / "file"),
    "a file of tmpfs": tmpfs_file,
    "a path": lambda folder: file_at(folder / "file", os.O_PATH),
    "a socket": lambda _: socket.socket().detach(),
    "may shrink": lambda _: sealed(fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL),
    "may grow": lambda _: sealed(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL),
    "may be sealed further": lambda _: sealed(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW),
    "sealed against writing": lambda _: sealed(SEALS | fcntl.F_SEAL_WRITE),
    "not sealed": lambda _: os.memfd_create("test"),
    "read-only": lambda _: read_only(),
}


@pytest.mark.parametrize("what", WRONG)
def test_only_sealed_segments_are_mapped(what: str, tmp_path: Path) -> None:
    descriptor = WRONG[what](tmp_path)
    before = descriptors()
    with pytest.raises(Unreachable, match=NO_MEMORY):
        Segment(64, descriptor=descriptor)
    assert descriptors() == before - 1


@pytest.mark.parametrize("said", [63, 65, 4096, 1 << 40, 0])
def test_a_segment_has_the_size_that_is_said(said: int) -> None:
    with pytest.raises(Unreachable, match=f"a memory of 64 bytes was handed over as one of {said:,}"):
        Segment(said, descriptor=sealed(SEALS))
    Segment(64, descriptor=sealed(SEALS)).close()


def test_messages_that_are_none_are_dropped_with_their_descriptors(ends: tuple[socket.socket, socket.socket]) -> None:
    with Segment(64) as segment, Link(ends[1]) as taker:
        label = LABEL.pack(segment.key, 64)
        before = descriptors()
        for data, count in [(label, 0), (label, 2), (label[:-1], 1), (label + b"x", 1), (b"x" * 9999, 1)]:
            socket.send_fds(ends[0], [data], [segment.descriptor] * count)
        Link(ends[0]).give(segment)
        found = [handed for handed in taker.taken() if handed[0] == segment.key]
        for _, descriptor, _ in found:
            os.close(descriptor)
        assert descriptors() == before
        assert found[-1][2] == 64


def test_a_server_maps_what_came_over_its_desk_and_nothing_else() -> None:
    with Desk() as desk, OthersMemory() as trainers, Segment(64) as known, Segment(64) as unknown:
        link = trainers.visit(desk.name)
        link.give(known)
        assert desk.segment(memory_of(known)).nbytes == 64
        for memory in (memory_of(unknown), Memory(key=b"", size=64), Memory()):
            with pytest.raises(Unreachable, match="its memory was not handed over"):
                desk.segment(memory)
        with pytest.raises(Unreachable, match="36 bytes at 32 of a memory of 64"):
            desk.array(Place(memory=Memory(key=known.key, size=1 << 40), offset=32), 9)


def test_both_ends_of_a_desk_hand_over() -> None:
    pool = SegmentPool()
    array = pool.empty(100)
    array[...] = np.arange(100)
    with Desk() as desk, OthersMemory() as trainers, Segment(64) as probe:
        trainers.visit(desk.name).give(probe)
        place = place_of(array[10:], pool, desk.giver_of(memory_of(probe)).give)
        np.testing.assert_array_equal(trainers.array(place, 90), np.arange(10, 100))
        assert place_of(np.zeros(3, np.float32), pool, desk.giver_of(memory_of(probe)).give) == Place()
    pool.close()


def test_a_desk_that_is_shut_or_elsewhere_is_not_reached() -> None:
    with Desk() as desk, OthersMemory() as trainers, Segment(64) as segment:
        trainers.visit(desk.name).give(segment)
        assert desk.segment(memory_of(segment)).key == segment.key
        desk.shut()
        for name in (desk.name, "gradsync-elsewhere"):
            with pytest.raises(Unreachable, match="they are on different hosts"):
                trainers.visit(name)
        with pytest.raises(Unreachable, match="the server does not offer its memory"):
            trainers.visit("")


def test_who_has_gone_cannot_be_handed_anything() -> None:
    with Desk() as desk, Segment(64) as segment, Segment(64) as other:
        with OthersMemory() as trainers:
            trainers.visit(desk.name).give(segment)
            link = desk.giver_of(memory_of(segment))
        with pytest.raises(Unreachable, match="memory cannot be handed over"):
            link.give(other)
        assert desk.segment(memory_of(segment)).nbytes == 64  # that it gave before


def test_everything_is_given_back() -> None:
    before = descriptors()
    with Desk() as desk, OthersMemory() as trainers, Segment(64) as first, Segment(64) as second:
        for segment in (first, second):
            trainers.visit(desk.name).give(segment)
        assert desk.segment(memory_of(first)).nbytes == 64
        assert desk.giver_of(memory_of(second))
    assert descriptors() == before


def test_a_peer_of_this_user_is_one(ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    check_user(ends[0])
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    with pytest.raises(Unreachable, match="they are of different users"):
        Link(ends[0])
    assert ends[0].fileno() == -1
