"""Notices a trainer that does not take part any longer, though its connection is up: frozen, or far too slow.

A dead trainer is noticed sooner, when the kernel closes its connection: liveness.py, Members.lose.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from common.errors import PeerStalled
from common.network.gradsync_pb2 import ServerMessage
from common.network.rendezvous import GRACE
from ps.coordinator.liveness import Members

__all__ = ["Silence"]

WATCH_S = 0.1  # how often the watch looks
SIGN_S = GRACE / 2  # trainers that wait hear so often that others still send


class Silence:
    """Fails the group when somebody has waited for others for too long. Every method is called with `lock` held.

    Args:
        timeout: how long, in seconds, trainers may wait for one that does not take part.
        missing: whom they wait for.
        clock: tells the time in seconds.
    """

    def __init__(
        self,
        members: Members,
        lock: threading.Condition,
        timeout: float,
        missing: Callable[[], list[int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout, self._clock = timeout, clock
        self._members, self._lock, self._missing = members, lock, missing
        self._waiting_since: float | None = None
        self._sign_at = clock()
        self.thread = threading.Thread(target=self.watch, name="gradsync-silence", daemon=True)
        self.thread.start()

    @property
    def somebody_waits(self) -> bool:
        return self._waiting_since is not None

    def someone_waits(self) -> None:
        """From now on, if nobody has before."""
        if self._waiting_since is None:
            self._waiting_since = self._clock()

    def nobody_waits(self) -> None:
        self._waiting_since = None

    def still_alive(self) -> None:
        """Data have come, so the time that others may wait counts from now: here, and at the trainers, who would else
        take the server for frozen before it can name who is."""
        now = self._clock()
        if self._waiting_since is not None:
            self._waiting_since = now
        if now - self._sign_at > SIGN_S:
            self._sign_at = now
            for rank in self._members.queues.keys() - self._members.gone:
                self._members.queues[rank].put([ServerMessage()])

    def watch(self) -> None:
        """Until the training is over."""
        with self._lock:
            while not self._members.over:
                self._lock.wait(WATCH_S)
                since, now = self._waiting_since, self._clock()
                if since is not None and now - since > self.timeout:
                    ranks = ", ".join(str(rank) for rank in self._missing())
                    self._members.fail(
                        PeerStalled(
                            f"rank {ranks} did not take part in step {self._members.steps} for {self.timeout:g} s; "
                            "it is frozen or slower than --timeout allows"
                        )
                    )
