"""Connections over TLS take and give what plain ones do, and forget nothing of it."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from typing import Any

import numpy as np
import pytest

from common.errors import ProtocolError
from common.network.links import FRAME, Link
from common.network.tls_sockets import RECORD_BYTES, TlsSocket, chunk_of, pending_in
from tests.support.credentials import shake_hands
from tests.support.groups import assert_same_bits, on_threads, sample

TAG = b"which one"
HEADER_BYTES = FRAME.size + len(TAG)
DEADLINE_S = 20.0


@pytest.fixture
def ends() -> Iterator[list[TlsSocket]]:
    """Buffers of the kernel are small, so that they are full at once."""
    raw = socket.socketpair()
    for each in raw:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
    made = shake_hands(raw)
    yield made
    for each in made:
        each.close()


def readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


class Exchange:
    """One thread's both ends: each sends arrays, and receives the other's."""

    def __init__(self, ends: list[TlsSocket], sizes: list[int]) -> None:
        self.links = [Link(each, len(TAG)) for each in ends]
        self.sent = [[sample(end, size, "uint8", seed=k) for k, size in enumerate(sizes)] for end in (0, 1)]
        self.got = [bytearray(), bytearray()]
        self.whole = sum(sizes) + HEADER_BYTES * len(sizes)

    def put(self) -> None:
        for link, arrays in zip(self.links, self.sent, strict=True):
            for array in arrays:
                link.put(array, TAG)

    def receive(self, end: int, room: int) -> bool:
        """Once, in parts as of a header and a payload."""
        space = bytearray(room)
        try:
            count = self.links[end].receive([memoryview(space)[: room // 3], memoryview(space)[room // 3 :]])
        except BlockingIOError:
            return False
        assert count
        self.got[end] += space[:count]
        return True

    def run(self, room: int) -> None:
        """Until all has come: who cannot do anything sleeps until the kernel says that it can."""
        while any(len(got) < self.whole for got in self.got):
            moved = [link.push() for link in self.links]
            moved += [self.receive(end, room) for end in (0, 1) if len(self.got[end]) < self.whole]
            if not any(moved):
                poll = select.poll()
                for link in self.links:
                    poll.register(link.connection, select.POLLIN | (select.POLLOUT if link.unsent else 0))
                assert poll.poll(DEADLINE_S * 1000), "what TLS has kept was forgotten"

    def check(self) -> None:
        for end, got in enumerate(self.got):
            at = 0
            for array in self.sent[1 - end]:
                assert got[at + FRAME.size : at + HEADER_BYTES] == TAG
                at += HEADER_BYTES + array.size
                assert_same_bits(np.frombuffer(got, np.uint8)[at - array.size : at], array)
            assert at == len(got)


@pytest.mark.parametrize("room", [7, 5000, 100_003])
@pytest.mark.parametrize(
    "sizes",
    [[0, 1, 3, 16_000], [RECORD_BYTES - HEADER_BYTES, RECORD_BYTES, RECORD_BYTES + 1], [700_001, 1, 0, 131_072]],
)
def test_both_directions_are_full_at_once_and_all_arrives(ends: list[TlsSocket], sizes: list[int], room: int) -> None:
    if room == 7 and sum(sizes) > 100_000:
        sizes = [each // 50 for each in sizes]
    exchange = Exchange(ends, sizes)
    exchange.put()
    exchange.run(room)
    exchange.check()


def test_what_could_not_be_sent_is_offered_again_though_more_has_come_to_it(ends: list[TlsSocket]) -> None:
    exchange = Exchange(ends, [9, 140_000, 3, 300_000])
    for link, arrays in zip(exchange.links, exchange.sent, strict=True):
        for array in arrays:
            link.put(array, TAG)
            link.push()  # with fewer buffers than the next time
    exchange.run(50_000)
    exchange.check()


def test_what_was_offered_together_may_be_offered_in_parts_the_next_time(ends: list[TlsSocket]) -> None:
    """As by a rank that leaves in the middle of a large message."""
    sizes = [30, 9_000, 0, 5, 40_000, 1, 2, 3, 262_144, 7] * 3
    left = deque(memoryview(sample(0, size, "uint8", seed=k).data) for k, size in enumerate(sizes))
    expected, got, together = b"".join(left), bytearray(), True
    for each in ends:
        each.setblocking(False)
    while len(got) < len(expected):
        try:
            sent = ends[0].sendmsg(list(left if together else islice(left, 1)))
        except BlockingIOError:
            sent, together = 0, not together
            got += everything_at(ends[1])
        while left and sent >= len(left[0]):
            sent -= len(left.popleft())
        if sent:
            left[0] = left[0][sent:]
        if not left:
            got += everything_at(ends[1])
    assert got == expected


def everything_at(end: TlsSocket) -> bytes:
    found = b""
    with suppress(BlockingIOError):
        while True:
            found += end.recv(5_000)
    return found


def test_no_two_threads_are_in_openssl_at_once(ends: list[TlsSocket], monkeypatch: pytest.MonkeyPatch) -> None:
    """Python lets others run meanwhile, and holds them off only from 3.13 on."""
    held: list[bool] = []
    send, receive = ssl.SSLSocket.send, ssl.SSLSocket.recv_into

    def watched(function: Callable[..., int]) -> Callable[..., int]:
        def call(end: TlsSocket, *given: Any) -> int:
            held.append(end.lock.locked())
            return function(end, *given)

        return call

    monkeypatch.setattr(ssl.SSLSocket, "send", watched(send))
    monkeypatch.setattr(ssl.SSLSocket, "recv_into", watched(receive))
    ends[0].sendall(b"word")
    assert ends[1].recv(4) == b"word"
    assert held == [True, True]


def test_what_was_decrypted_and_not_taken_is_told_and_can_be_had_without_the_kernel(ends: list[TlsSocket]) -> None:
    for each in ends:
        each.setblocking(False)
    assert ends[0].sendmsg([b"a header", b"and what follows"]) == 24
    space = bytearray(8)
    assert select.select([ends[1]], [], [], DEADLINE_S)[0]
    assert ends[1].recv_into(space) == 8
    assert (bytes(space), readable(ends[1]), pending_in(ends[1])) == (b"a header", False, 16)
    assert ends[1].recv(100) == b"and what follows"
    assert pending_in(ends[1]) == 0
    with pytest.raises(BlockingIOError):
        ends[1].recv(1)


def test_a_receiver_is_never_woken_only_when_many_bytes_have_come(ends: list[TlsSocket]) -> None:
    """Of these TLS may have read a part already."""
    link = Link(ends[0], len(TAG))
    link.wake_for(100_000)
    assert ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


def test_one_thread_sends_while_another_receives(ends: list[TlsSocket]) -> None:
    exchange = Exchange(ends, [1_000_001])
    exchange.put()

    def send(link: Link) -> None:
        while link.unsent:
            if not link.push():
                select.select([], [link.connection], [], DEADLINE_S)

    senders = [threading.Thread(target=send, args=[link]) for link in exchange.links]
    for sender in senders:
        sender.start()

    def receive(end: int) -> None:
        while len(exchange.got[end]) < exchange.whole:
            if not exchange.receive(end, 70_000):
                assert select.select([ends[end]], [], [], DEADLINE_S)[0]

    on_threads(2, receive)
    for sender in senders:
        sender.join()
    exchange.check()


def test_the_end_of_the_other_one_is_the_end(ends: list[TlsSocket]) -> None:
    link = Link(ends[0], len(TAG))
    ends[1].close()
    assert link.receive([memoryview(bytearray(8))]) == 0


def test_a_byte_changed_on_the_way_is_an_error_that_names_the_other_end() -> None:
    with ExitStack() as opened:
        left, right = socket.socketpair(), socket.socketpair()
        for each in (*left, *right):
            opened.enter_context(each)
        passed_on = [threading.Thread(target=pass_on, args=way) for way in ((left[1], right[0]), (right[0], left[1]))]
        for thread in passed_on:
            thread.start()
        ends = shake_hands((left[0], right[1]))
        for each in ends:
            opened.enter_context(each)
        DAMAGE.set()
        ends[0].sendall(b"a payload")
        link = Link(ends[1], len(TAG))
        assert select.select([ends[1]], [], [], DEADLINE_S)[0]
        with pytest.raises(ProtocolError, match=r"^data from rank 0 were damaged or forged \(.*BAD_RECORD_MAC"):
            link.receive([memoryview(bytearray(9))])
        for end in (left[1], right[0]):
            end.shutdown(socket.SHUT_RDWR)
        for thread in passed_on:
            thread.join()
    DAMAGE.clear()


DAMAGE = threading.Event()


def pass_on(source: socket.socket, to: socket.socket) -> None:
    with suppress(OSError):  # an end has gone
        while data := bytearray(source.recv(100_000)):
            if DAMAGE.is_set():
                data[-1] ^= 1
            to.sendall(data)


@pytest.mark.parametrize("at", [0, 3, 10, 20_000, 50_000])
def test_short_buffers_make_one_record_and_long_ones_are_not_copied(at: int) -> None:
    parts = [bytes([k]) * size for k, size in enumerate((4, 0, 9, 40_000, 5, 300_000))]
    whole = b"".join(parts)
    chunk = chunk_of([memoryview(part) for part in parts], at)
    assert bytes(chunk) == whole[at : at + len(chunk)]
    assert len(chunk) >= min(RECORD_BYTES, len(whole) - at)
    assert chunk_of([memoryview(part) for part in parts], len(whole)) == b""
