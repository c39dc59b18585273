"""Runs the synchronisation of buckets beside backward, strictly in launch order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

__all__ = ["BucketRunner", "BucketThread", "LaunchOrder"]


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


class BucketThread:
    """One thread that works off what it is given, in turn, for all models of a group."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gradsync-buckets", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        """Call `work`, which raises nothing, when all that was put before is done."""
        self._todo.put(work)

    def close(self) -> None:
        """End the thread; waits for what was put before."""
        if self._thread.is_alive():
            self._todo.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            work()


class BucketRunner:
    """Calls `work(bucket)` for each bucket of one model on a thread, or all of them in `finish`.

    `work` must have deadlines of its own. Its first error is raised by `finish`, and the rest is skipped.

    Args:
        overlap: run `work` on a thread; otherwise who calls `finish` does.
        thread: the one to share with other models; None: one of its own.
        beside: whether buckets start beside backward, not when it is done. It may change between steps.
    """

    def __init__(
        self,
        count: int,
        work: Callable[[int], None],
        *,
        overlap: bool = True,
        thread: BucketThread | None = None,
        beside: Callable[[], bool] = lambda: True,
    ) -> None:
        self.order = LaunchOrder(count)
        self._own = BucketThread() if overlap and thread is None else None
        self._work, self._thread, self._beside = work, thread or self._own, beside
        self._error: BaseException | None = None

    def mark_ready(self, bucket: int) -> None:
        ready = self.order.mark(bucket)
        if self._thread and self._beside():
            for index in ready:
                self._thread.put(partial(self._guarded, index))

    def finish(self) -> None:
        """Block until every bucket of the step is done; then a new step may begin."""
        if not (self._thread and self._beside()):
            self.order.reset()
        rest = self.order.rest()
        if self._thread:
            done = threading.Event()
            for index in rest:
                self._thread.put(partial(self._guarded, index))
            self._thread.put(done.set)
            done.wait()
        else:
            for index in rest:
                self._guarded(index)
        self.order.reset()
        if self._error:
            raise self._error

    def close(self) -> None:
        """End the thread, if it is its own; waits for a bucket under way."""
        if self._own:
            self._own.close()

    def _guarded(self, bucket: int) -> None:
        if self._error:
            return
        try:
            self._work(bucket)
        except BaseException as exc:
            self._error = exc
