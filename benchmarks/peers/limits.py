"""What the machine itself can do, measured beside the others in the same run: lower bounds, not all-reduces.

memory-limit    every rank reads its own array and writes it back, all at the same time. An all-reduce on one host must
                do at least that: every input is read once and every output written once (docs/performance.md).
loopback-limit  every rank sends 2(N-1)/N of the array to the next one over a plain TCP socket and receives as much,
                which is what a ring moves through each link, without adding anything.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from common.memory import aligned_empty

__all__ = ["Rank", "sums", "why_absent"]

sums = False
CALL = 1 << 20  # bytes a system call


def why_absent(name: str) -> str:  # noqa: ARG001 - both are always there
    return ""


class Rank:
    array: npt.NDArray[Any]

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:
        self._nranks = nranks
        self._sockets = meet(rank, nranks, address) if name == "loopback-limit" and nranks > 1 else None

    def resize(self, count: int) -> None:
        self.array = aligned_empty(count)
        share = 2 * (self._nranks - 1) * self.array.nbytes // self._nranks
        self._outgoing, self._incoming = memoryview(bytearray(share)), memoryview(bytearray(share))

    def all_reduce(self) -> None:
        if self._sockets is None:
            np.multiply(self.array, np.float32(1), out=self.array)
            return
        to_next, from_previous = self._sockets
        sender = threading.Thread(target=to_next.sendall, args=(self._outgoing,))
        sender.start()
        got = 0
        while got < len(self._incoming):
            got += from_previous.recv_into(self._incoming[got : got + CALL])
        sender.join()

    def close(self) -> None:
        for each in self._sockets or ():
            each.close()


def meet(rank: int, nranks: int, address: str) -> tuple[socket.socket, socket.socket]:
    """(connection to the next rank, from the previous one); ports are told through abstract sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as told:
        told.bind(f"\0{address}-{rank}")
        told.listen()
        asking = threading.Thread(target=lambda: tell(told, listener.getsockname()[1]))
        asking.start()
        to_next = socket.create_connection(("127.0.0.1", ask(f"\0{address}-{(rank + 1) % nranks}")))
        from_previous, _ = listener.accept()
        asking.join()
    for each in (to_next, from_previous):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return to_next, from_previous


def tell(told: socket.socket, port: int) -> None:
    connection, _ = told.accept()
    with connection:
        connection.sendall(str(port).encode())


def ask(name: str) -> int:
    deadline = time.monotonic() + 30.0
    while True:
        with socket.socket(socket.AF_UNIX) as asking:
            try:
                asking.connect(name)
                return int(asking.recv(16))
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
