"""Which buckets are marked ready while backward goes on, and in which order all ranks start them."""

from __future__ import annotations

import numpy as np

from common.errors import UsageError
from common.sync.synchronizer import Synchronizer

__all__ = ["EarlyBuckets"]


class EarlyBuckets:
    """Marks buckets as they become complete, where that is safe; the others when backward is done.

    Recomputation runs backwards within backward, each of which reaches the weights that it shares with others. The
    first backward shows where that is; such buckets wait for the end of backward. So does the last bucket, which tells
    which parameters were used.
    """

    def __init__(self, synchronizer: Synchronizer, count: int) -> None:
        self._synchronizer, self._count = synchronizer, count
        self._early: set[int] = set()  # buckets that may be marked during backward; known after the first one
        self._twice: set[int] = set()  # buckets in which one backward reaches a parameter more than once
        self._marked: set[int] = set()  # in this backward
        self._completed: list[int] = []  # in this backward, in order
        self._order_agreed = False
        self._synchronise = True

    def begin(self, *, synchronise: bool) -> None:
        """A backward begins. `synchronise`: its gradients are not only accumulated."""
        self._synchronise = synchronise
        self._marked.clear()
        self._completed = []

    def complete(self, bucket: int) -> None:
        """All gradients of a bucket are there."""
        self._completed.append(bucket)
        if self._synchronise and bucket in self._early:
            self._marked.add(bucket)
            self._synchronizer.mark_ready(bucket)

    def reached_again(self, bucket: int, name: str) -> None:
        """A parameter of a bucket has been given a gradient before in this backward.

        Raises:
            UsageError: and that one has been sent.
        """
        self._twice.add(bucket)
        if bucket in self._marked:
            raise UsageError(
                f"backward reached parameter {name} again after its gradient was sent, as it did not before: "
                "use layers that are recomputed and share weights in the first backward too"
            )

    def learn(self) -> None:
        """A backward has shown which buckets may be marked during the next one."""
        self._early = set(range(self._count - 1)) - self._twice

    def mark_rest(self, *, all_again: bool = False) -> None:
        """Mark what was not marked in this backward; or all, if that has ended."""
        for bucket in range(self._count):
            if all_again or bucket not in self._marked:
                self._synchronizer.mark_ready(bucket)

    def agree_on_order(self) -> None:
        """After the first backward: buckets start in the order in which they became complete on rank 0."""
        if self._order_agreed:
            return
        early = [bucket for bucket in self._completed if bucket in self._early]
        rest = [bucket for bucket in range(self._count) if bucket not in early]
        everyones = self._synchronizer.all_gather(np.array([*early, *rest]))
        self._synchronizer.launch_in(everyones[0].tolist())
        self._order_agreed = True
