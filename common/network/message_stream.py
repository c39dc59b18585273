"""Messages both ways between two processes, over one gRPC call that lasts as long as both live: each end notices at
once that the other is gone, and, by signs of life, after some seconds that nothing comes from it any more."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import grpc

__all__ = ["MessageStream"]

SIGN_S = 1.0  # between two signs of life, where nothing else is sent
SIGN = b""


class MessageStream:
    """One end. Thread-safe; no method but `outgoing` and `read` blocks, which are for gRPC's threads and for one more.

    Args:
        peer: who is at the other end, for people.
        silence: seconds without a sign of life after which it counts as gone, until there is one.
    """

    def __init__(self, peer: str, silence: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.peer, self._silence, self._clock = peer, silence, clock
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: no more
        self._lock = threading.Lock()
        self._come: list[bytes] = []
        self._ended = ""
        self._heard_at = clock()
        self._lapsed = False

    def send(self, message: bytes) -> None:
        """To the other end, if it is there."""
        self._outgoing.put(message)

    def take(self) -> list[bytes]:
        """What has come and not been taken yet."""
        with self._lock:
            come, self._come = self._come, []
            return come

    @property
    def gone(self) -> str:
        """Why nothing comes from the other end any more, in words; "": it lives."""
        silent = self._clock() - self._heard_at
        return self._ended or (f"{self.peer} was silent for {silent:.0f} s" if silent > self._silence else "")

    @property
    def has_lapsed(self) -> bool:
        """Whether it was silent for too long, now or at any time: TCP may keep what is sent back for as long again."""
        return self._lapsed or bool(self.gone)

    def renew(self) -> None:
        """The other end was heard of in another way: silence counts from now on."""
        self._heard_at = self._clock()

    def end(self, why: str) -> None:
        """The call is over, or is to be."""
        with self._lock:
            self._ended = self._ended or why
        self._outgoing.put(None)

    def outgoing(self) -> Iterator[bytes]:
        """What gRPC is to send, with signs of life between; until the end, what was to be sent before it first."""
        while True:
            try:
                message = self._outgoing.get(timeout=SIGN_S)
            except queue.Empty:
                message = SIGN
            if message is None:
                return
            yield message

    def read(self, received: Iterable[bytes]) -> None:
        """Take in what gRPC receives, until the end."""
        try:
            for message in received:
                now = self._clock()
                self._lapsed = self._lapsed or now - self._heard_at > self._silence
                self._heard_at = now
                if message != SIGN:
                    with self._lock:
                        self._come.append(message)
        except grpc.RpcError:  # that it has ended is all there is to know
            pass
        finally:
            self.end(f"{self.peer} is gone")
