"""Notices a trainer that does not take part any longer, though its connection is up: frozen, or far too slow.

While trainers wait, all are asked for signs of life, which a thread of theirs gives whatever their training does; how
long the others then wait says common/network/patience.py. A dead trainer is noticed sooner, when the kernel closes its
connection: liveness.py, Members.lose.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from common.network.gradsync_pb2 import Alive, ServerMessage
from common.network.patience import Patience
from common.network.reach import told_apart
from common.network.rendezvous import GRACE
from ps.coordinator.liveness import Lives, Members

__all__ = ["WATCH_S", "Silence"]

WATCH_S = 0.1  # how often the watch looks
SIGN_S = GRACE / 2  # trainers that wait hear so often that others still send


class Silence:
    """Fails the group when somebody has waited for others for too long. Every method is called with `lock` held.

    Args:
        patience: of the trainers that wait for one that does not take part.
        missing: whom they wait for.
        waiting: who waits, as far as is known.
        lives: the signs of life of these trainers.
        stuck: whether all wait, each for another one.
        steps: they wait within steps, which errors name.
        speaks: this server says whom they wait for, by the lowest rank's stderr.
        clock: tells the time in seconds.
    """

    def __init__(
        self,
        members: Members,
        lock: threading.Condition,
        patience: Patience,
        missing: Callable[[], list[int]],
        waiting: Callable[[], list[int]],
        lives: Lives,
        *,
        stuck: Callable[[], bool] = lambda: False,
        steps: bool = True,
        speaks: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.patience, self._clock, self._steps, self._speaks = patience, clock, steps, speaks
        self._members, self._lock, self._missing, self._waiting = members, lock, missing, waiting
        self._lives, self._stuck = lives, stuck
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

    def heard(self, rank: int) -> None:
        """A trainer gives a sign of life."""
        self._lives.heard[rank] = self._clock()

    def watch(self) -> None:
        """Until the training is over."""
        with self._lock:
            while not self._members.over:
                self._lock.wait(WATCH_S)
                since, now = self._waiting_since, self._clock()
                if since is not None and not self._members.over:
                    self._look(now, since)

    def _look(self, now: float, since: float) -> None:
        """Somebody has waited since then."""
        waited = now - since
        if self.patience.asks(now, waited):
            self._send(self._members.queues.keys() - self._members.gone, Alive())
            self._lives.ask(self._members.absent_from(self._members.queues))
        if waited <= self.patience.timeout:
            return
        missing, steps = self._missing(), self._members.steps
        doing = f" in step {steps}" if self._steps else ""
        silent = {rank: now - max(since, self._lives.heard.get(rank, since)) for rank in missing}
        if error := self.patience.ends(silent, waited, doing=doing, stuck=bool(missing) and self._stuck()):
            rank = max(silent, key=lambda each: silent[each])
            host = self._lives.hosts.get(rank, "")
            self._members.fail(told_apart(error, f"rank {rank}", host, self.patience.timeout))
            return
        line = self.patience.remark(self._waiting(), missing, steps if self._steps else None, waited)
        if line and self._speaks:
            self._send([min(self._members.queues.keys() - self._members.gone)], Alive(say=line))

    def _send(self, ranks: Iterable[int], alive: Alive) -> None:
        for rank in ranks:
            self._members.queues[rank].put([ServerMessage(alive=alive)])
