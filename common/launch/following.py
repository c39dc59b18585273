"""What the launcher of another host than the first does about failures: it reports them, and does as it is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from common.launch.child import ProcessFailed
from common.launch.crew import CrewHere, lost
from common.launch.crew_messages import Failure, Order, RankReport, Report, orders_in, send
from common.launch.hosts import Place
from common.network.message_stream import MessageStream

__all__ = ["Following"]

LOOK_S = 0.1  # between two looks at what ranks have noted, while none has died and nothing is asked for
FROZEN_S = 1.0  # likewise, at whether one is frozen


@dataclass
class Following:
    """Args:
    here: the ranks of this host.
    stream: with the first host's launcher.
    hosts: this one's place among all hosts; None: if one is lost, all are started again.
    """

    here: CrewHere
    stream: MessageStream
    hosts: Place | None = None
    clock: Callable[[], float] = time.monotonic
    _met: int = field(init=False)  # the epoch in which the launchers have met last
    _noticed_at: float | None = None  # that something is wrong; None: nothing is
    _reported: Report | None = None
    _gave_up: bool = False
    _over: bool = False  # on all hosts
    _mends: bool = False  # ranks are being replaced
    _looked_at: float = 0.0
    _frozen: Collection[str] = ()  # names of those that were, when looked at last
    _frozen_at: float = 0.0  # when that was

    def __post_init__(self) -> None:
        self._met = self.here.life

    def look(self) -> bool:
        """As of Replacing."""
        gone = self.stream.gone  # before what was said last is taken
        orders = orders_in(self.stream, self._met)
        for order in orders:
            self._follow(order)
        if self._gave_up:
            return self.here.leave(self._noticed_at)
        dead = any(rank.code for rank in self.here.children)
        calm = self._noticed_at is None and not (orders or dead or self.here.is_over)
        if calm and self.clock() < self._looked_at + LOOK_S:
            return False
        self._looked_at = self.clock()
        if self._noticed_at is None and not orders and self.here.start_over():
            return True
        self._report()
        epoch = self.here.job.life.number
        waits = any(rank.code is None and rank.waits_for() > epoch for rank in self.here.children)
        if dead or waits or self._mends:
            self._noticed_at = self.clock() if self._noticed_at is None else self._noticed_at
        elif self._over or not (self.here.is_over or (gone and not self.here.has_met)):
            return False  # where it is over here only, another host may have to begin anew
        return self._give_up(gone) if gone else True

    def _follow(self, order: Order) -> None:
        for rank in [rank for rank in self.here.children if rank.name in order.kill]:
            self.here.kill(rank)
        since = self.clock() if self._mends else self._noticed_at  # this is another failure
        error = order.failure.error(since) if order.failure else None
        if order.end and error:
            self._replace(order, error)
        self.here.start(order.start, order.place)
        if order.word:
            self.here.give(order.word)
        if order.went_on:
            self.here.went_on(*order.went_on)
            self._mends, self._noticed_at = False, None
        self._over = self._over or order.over
        if order.gave_up:
            self._gave_up = True
            self.here.give_up(error)

    def _replace(self, order: Order, error: ProcessFailed) -> None:
        """
        Raises:
            RecoveryFailed: no restart is left.
        """
        life = self.here.job.life
        if order.epoch != life.number + 1 or not life.replace(error, order.end):
            self._give_up()
            return
        self._mends = True
        self.here.end(error, order.end, order.epoch)
        if order.meet and self.hosts:
            self.hosts.meet_again(order.epoch, error.cause)
            self.stream, self._met, self._reported = self.hosts.stream(0), order.epoch, None

    def _give_up(self, gone: str = "") -> bool:
        self._gave_up = True
        self.here.give_up(lost(gone))
        self._report()
        return self.here.leave(self._noticed_at)

    def _report(self) -> None:
        """What has changed."""
        if self._noticed_at is not None or self.clock() >= self._frozen_at + FROZEN_S:
            self._frozen = [rank.name for rank in self.here.children if rank.code is None and rank.is_frozen()]
            self._frozen_at = self.clock()
        ranks = [
            RankReport(
                rank.name,
                self.here.begun.get(rank.name, self.here.life),
                rank.code,
                frozen=rank.name in self._frozen,
                keeps=self.here.has_kept(rank),
                notes=rank.told,
            )
            for rank in self.here.children
        ]
        failure = self.here.failure()  # after these looks, so that there is one for each that has failed
        report = Report(self._met, ranks, Failure.of(failure) if failure else None, self._gave_up)
        if report != self._reported:
            self._reported = report
            send(self.stream, report)
