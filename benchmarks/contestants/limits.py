"""What the machine itself can do, measured beside the others in the same run: lower bounds, not all-reduces.

memory-limit    every rank reads its own array and writes it back, all at the same time. An all-reduce on one host must
                do at least that: every input is read once and every output written once (docs/performance.md).
                Of a broadcast: rank 0 reads its array, every other rank writes its own.
loopback-limit  every rank sends 2(N-1)/N of the array to the next one over a plain TCP socket and receives as much,
                which is what a ring moves through each link; from and to memory that stays in the cache, and nothing
                is added. Between emulated hosts it is called ring-limit.
                Of a broadcast: every rank but the last sends the array to the next one.
round-limit     every rank reads its own array, and reads and writes its 1/N of the parameters: the least memory that
                a parameter server's round with SGD can move, N + 2 times the array.
memcpy          rank 0 copies the array, and nobody else does anything.
link            between emulated hosts: rank 0 sends the array to rank 1 over a plain TCP socket, and nobody else sends.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from common.system.memory import aligned_empty

__all__ = ["Rank", "sums", "uses_ports", "why_absent"]

sums = False
uses_ports = True
CALL = 1 << 18  # bytes a system call
MEET_S = 30.0


def why_absent(name: str) -> str:  # noqa: ARG001 - both are always there
    return ""


class Rank:
    apart: bool
    array: npt.NDArray[Any]
    parameters: npt.NDArray[Any]

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:
        self._name, self._rank, self._nranks = name, rank, nranks
        self.apart = name in ("memory-limit", "round-limit")  # ranks that never meet
        moves = name not in ("memory-limit", "round-limit", "memcpy") and nranks > 1
        self._sockets = meet(rank, address.split(",")) if moves else None

    def resize(self, count: int) -> None:
        self.array = aligned_empty(count)
        self.array.fill(0)
        self.parameters = aligned_empty(count if self._name == "memcpy" else count // self._nranks)
        self.parameters.fill(0)
        if self._sockets is None:
            return
        self._outgoing, self._incoming = memoryview(bytearray(CALL)), memoryview(bytearray(CALL))

    def push_pull(self) -> None:
        if self._name == "memcpy":
            if self._rank == 0:
                self.parameters[...] = self.array
            return
        np.max(self.array)
        np.multiply(self.parameters, np.float32(1), out=self.parameters)

    def all_reduce(self) -> None:
        if self._sockets is None:
            np.multiply(self.array, np.float32(1), out=self.array)
            return
        if self._name == "link":
            self._stream(*self._sockets)
            return
        share = 2 * (self._nranks - 1) * self.array.nbytes // self._nranks
        self._both_ways(*self._sockets, share, share)

    def broadcast(self) -> None:
        first, last = self._rank == 0, self._rank == self._nranks - 1
        if self._sockets is not None:
            nbytes = self.array.nbytes
            self._both_ways(*self._sockets, 0 if last else nbytes, 0 if first else nbytes)
        elif first:
            np.max(self.array)
        else:
            self.array.fill(0)

    def _both_ways(self, to_next: socket.socket, from_previous: socket.socket, unsent: int, missing: int) -> None:
        """Send and receive so many bytes as the sockets are ready, from and to memory that stays in the cache."""
        to_next.setblocking(False)
        from_previous.setblocking(False)
        while unsent or missing:
            moved = False
            with suppress(BlockingIOError):
                if unsent:
                    unsent -= to_next.send(self._outgoing[:unsent])
                    moved = True
            with suppress(BlockingIOError):
                if missing:
                    missing -= self._receive(from_previous, missing)
                    moved = True
            if not moved:
                poll = select.poll()
                if unsent:
                    poll.register(to_next, select.POLLOUT)
                if missing:
                    poll.register(from_previous, select.POLLIN)
                if not poll.poll(MEET_S * 1000):
                    raise ConnectionError(f"a neighbour did not take part for {MEET_S:g} s")

    def _stream(self, to_next: socket.socket, from_previous: socket.socket) -> None:
        """There and, when all is there, one byte back."""
        left = self.array.nbytes
        if self._rank == 0:
            while left:
                left -= to_next.send(self._outgoing[:left])
            from_previous.recv(1)
        else:
            while left:
                left -= self._receive(from_previous, left)
            to_next.sendall(b"!")

    def _receive(self, source: socket.socket, most: int) -> int:
        count = source.recv_into(self._incoming[:most])
        if not count:
            raise ConnectionError("the previous rank has gone")
        return count

    def close(self) -> None:
        for each in self._sockets or ():
            each.close()


def meet(rank: int, addresses: Sequence[str]) -> tuple[socket.socket, socket.socket]:
    """(connection to the next rank, from the previous one), each listening at its own address."""
    host, _, port = addresses[rank].rpartition(":")
    with socket.create_server((host, int(port))) as listener:
        listener.settimeout(MEET_S)
        to_next = call(addresses[(rank + 1) % len(addresses)])
        from_previous, _ = listener.accept()
    for each in (to_next, from_previous):
        each.settimeout(None)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return to_next, from_previous


def call(address: str) -> socket.socket:
    """Connect as soon as it listens."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            return socket.create_connection((host, int(port)), MEET_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
