"""Runs the synchronisation of buckets beside backward, strictly in launch order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

__all__ = ["BucketRunner", "LaunchOrder"]


class LaunchOrder:
    """Turns "bucket i is ready", told in any order, into the one order in which all ranks start buckets: by number,
    unless another one is given."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._order: Sequence[int] = range(count)
        self.reset()

    def follow(self, order: Sequence[int]) -> None:
        """Start buckets in this order from the next step on; called between steps.

        Raises:
            ValueError: it does not name every bucket once.
        """
        if sorted(order) != list(range(self.count)):
            raise ValueError(f"order must name each of {self.count} buckets once (got {list(order)})")
        self._order = list(order)

    def reset(self) -> None:
        self._ready = [False] * self.count
        self._next = 0

    def mark(self, bucket: int) -> Sequence[int]:
        """The buckets that may start now, in order; empty while an earlier one is not ready.

        Raises:
            ValueError: no such bucket, or marked before in this step.
        """
        if not 0 <= bucket < self.count:
            raise ValueError(f"bucket must be in 0..{self.count - 1} (got {bucket})")
        if self._ready[bucket]:
            raise ValueError(f"bucket {bucket} was marked ready twice in one step")
        self._ready[bucket] = True
        first = self._next
        while self._next < self.count and self._ready[self._order[self._next]]:
            self._next += 1
        return self._order[first : self._next]

    def rest(self) -> Sequence[int]:
        """Every bucket not started yet, in order; afterwards all are."""
        first, self._next = self._next, self.count
        return self._order[first:]


class BucketRunner:
    """Calls `work(bucket)` for each bucket on a thread of its own (`overlap`), or all of them in `finish`.

    `work` must have deadlines of its own. Its first error is raised by `finish`, and the rest is skipped.
    """

    def __init__(self, count: int, work: Callable[[int], None], *, overlap: bool = True) -> None:
        self.order = LaunchOrder(count)
        self._work = work
        self._error: BaseException | None = None
        self._todo: queue.SimpleQueue[int | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gradsync-buckets", daemon=True) if overlap else None
        if self._thread:
            self._thread.start()

    def mark_ready(self, bucket: int) -> None:
        ready = self.order.mark(bucket)
        if self._thread:
            for index in ready:
                self._todo.put(index)

    def finish(self) -> None:
        """Block until every bucket of the step is done; then a new step may begin."""
        if self._thread:
            done = threading.Event()
            for index in self.order.rest():
                self._todo.put(index)
            self._todo.put(done)
            done.wait()
        else:
            self.order.reset()
            for index in self.order.rest():
                self._guarded(index)
        self.order.reset()
        if self._error:
            raise self._error

    def close(self) -> None:
        """End the thread; waits for a bucket under way."""
        if self._thread:
            self._todo.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._todo.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._guarded(item)

    def _guarded(self, bucket: int) -> None:
        if self._error:
            return
        try:
            self._work(bucket)
        except BaseException as exc:
            self._error = exc
