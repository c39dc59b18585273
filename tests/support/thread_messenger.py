"""Messengers between threads of this process, and ranks that talk by nothing else, each with the calls of a program."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from common.errors import PeerLost, ProtocolError
from common.paddle_api.communication.communication import Communication
from common.sync.local import LocalSynchronizer
from common.sync.messenger import Messenger
from tests.support.groups import DEADLINE_S, Outcome, on_threads, outcomes_of

__all__ = ["ThreadMessenger", "ThreadRank", "communicating", "errors_communicating", "thread_ranks"]

T = TypeVar("T")
GONE = b"gone"


class Boxes:
    """What is under way between all ranks, by sender, receiver and channel."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int, int], queue.SimpleQueue[bytes]] = defaultdict(queue.SimpleQueue)
        self.lock = threading.Lock()
        self.gone = threading.Event()

    def of(self, *where: int) -> queue.SimpleQueue[bytes]:
        with self.lock:
            return self.boxes[where]


class ThreadMessenger(Messenger):
    """Of a rank that is a thread. A rank that fails ends the others' waits."""

    def __init__(self, rank: int, nranks: int, boxes: Boxes) -> None:
        self.rank, self.nranks, self._boxes = rank, nranks, boxes

    def send(self, to: int, channel: int, data: bytes | bytearray | memoryview) -> None:
        assert 0 <= to < self.nranks
        assert to != self.rank
        self._boxes.of(self.rank, to, channel).put(bytes(data))

    def receive(self, source: int, channel: int) -> bytearray:
        assert 0 <= source < self.nranks
        assert source != self.rank
        box = self._boxes.of(source, self.rank, channel)
        for _ in range(int(DEADLINE_S / 0.02)):
            try:
                return bytearray(box.get(timeout=0.02))
            except queue.Empty:
                if self._boxes.gone.is_set() and box.empty():
                    raise PeerLost("a rank failed") from None
        raise AssertionError(f"rank {self.rank} waited for rank {source} in vain")

    def comes(self, source: int, channel: int, seconds: float) -> bool:
        box = self._boxes.of(source, self.rank, channel)
        end = time.monotonic() + seconds
        while box.empty() and time.monotonic() < end and not self._boxes.gone.is_set():
            self._boxes.gone.wait(0.002)
        return not box.empty()


class ThreadRank(LocalSynchronizer):
    """Has nothing but a messenger; what all ranks do together they do by it."""

    backend = "threads"

    def __init__(self, messenger: ThreadMessenger) -> None:
        self.rank, self.nranks, self.messenger = messenger.rank, messenger.nranks, messenger
        self.gathered = 0  # so often

    def all_gather(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.gathered += 1
        others = [rank for rank in range(self.nranks) if rank != self.rank]
        for other in others:
            self.messenger.send(other, 0, values.tobytes())
        rows = {self.rank: values} | {r: self._row(self.messenger.receive(r, 0), values) for r in others}
        return np.stack([rows[rank] for rank in range(self.nranks)])

    def _row(self, data: bytearray, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if len(data) != like.nbytes:
            raise ProtocolError(f"all_gather: {len(data)} bytes, expected {like.nbytes}")
        return np.frombuffer(data, like.dtype).reshape(like.shape) if data else like


def communicating(nranks: int, body: Callable[[Communication], T], *, pickles: bool = False) -> list[T]:
    """What `body` returned on each rank; the first error is raised."""
    return on_threads(nranks, ranks_with(nranks, body, pickles))


def errors_communicating(nranks: int, body: Callable[[Communication], object]) -> Sequence[BaseException | None]:
    outcomes: list[Outcome[object]] = outcomes_of(nranks, ranks_with(nranks, body, False))
    return [outcome.error for outcome in outcomes]


def thread_ranks(nranks: int) -> list[ThreadRank]:
    boxes = Boxes()
    return [ThreadRank(ThreadMessenger(rank, nranks, boxes)) for rank in range(nranks)]


def ranks_with(nranks: int, body: Callable[[Communication], T], pickles: bool) -> Callable[[int], T]:
    boxes = Boxes()

    def on_rank(rank: int) -> T:
        synchronizer = ThreadRank(ThreadMessenger(rank, nranks, boxes))
        try:
            return body(Communication(lambda: synchronizer, lambda: pickles))
        except BaseException:
            boxes.gone.set()
            raise

    return on_rank
