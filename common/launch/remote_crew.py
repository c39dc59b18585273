"""The ranks of another host, as its launcher reports them to that of the first, which tells it what to do with them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.launch.child import Child, ProcessFailed
from common.launch.crew import Crew, lost
from common.launch.crew_messages import Failure, Order, RankReport, reports_in, send
from common.network.message_stream import MessageStream
from common.system.leftovers import Session
from common.system.next_epoch import Word

__all__ = ["RemoteCrew"]

NOWHERE = Path("/dev/null")


class Elsewhere:
    """In the place of a Popen."""

    def __init__(self) -> None:
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


class RemoteRank(Child):
    """What is known of one; nothing before the first report since it was started."""

    def __init__(self, name: str, begun: int) -> None:
        process: Any = Elsewhere()
        super().__init__(name, process, Session(0, None), None, NOWHERE, NOWHERE)
        self.report = RankReport(name, begun, None, frozen=False, keeps=False, notes="")
        self.killed = False

    @property
    def told(self) -> str:
        return self.report.notes

    def is_frozen(self) -> bool:
        return self.report.frozen

    def take(self, report: RankReport) -> None:
        if report.begun >= self.report.begun:  # else it is of the dead in whose place this one comes
            self.report, self.process.returncode = report, report.code


@dataclass
class RemoteCrew(Crew):
    """Args:
    stream: with its launcher.
    ranks: of that host.
    life: the epoch in which the launchers met last.
    """

    stream: MessageStream
    ranks: Sequence[int]
    life: int
    clock: Callable[[], float] = time.monotonic
    _ranks: dict[str, RemoteRank] = field(default_factory=dict)
    _failure: Failure | None = None
    _failed_at: float | None = None
    gave_up: bool = False
    _gone: str = ""

    def __post_init__(self) -> None:
        self._ranks = {name: RemoteRank(name, self.life) for name in (f"rank {rank}" for rank in self.ranks)}

    def hear(self) -> None:
        self._gone = self.stream.gone  # before what was said last is taken
        for report in reports_in(self.stream, self.life):
            if self._failure is None and report.failure is not None:
                self._failed_at = self.clock()
            self._failure, self.gave_up = report.failure, self.gave_up or report.gave_up
            for each in report.ranks:
                if each.name in self._ranks:
                    self._ranks[each.name].take(each)

    @property
    def children(self) -> Sequence[Child]:
        return [*self._ranks.values()]

    @property
    def gone(self) -> str:
        return self._gone

    def has_kept(self, child: Child) -> bool:
        if self._gone:
            return False
        lives_on = child.code is None and child.waits_for() < 0  # and may have kept some since the last report
        return lives_on or self._ranks[child.name].report.keeps

    def failure(self) -> ProcessFailed | None:
        if self._gone and any(rank.code for rank in self._ranks.values()):
            return lost(self._gone)
        if self._failure is None or not any(rank.code for rank in self._ranks.values()):
            return None
        return self._failure.error(self._failed_at)

    def kill(self, child: Child) -> None:
        rank = self._ranks[child.name]
        if not rank.killed:
            rank.killed = True
            self._order(kill=[rank.name])

    def end(self, failure: ProcessFailed, names: Sequence[str], epoch: int, *, meet: bool = False) -> None:
        self._ranks |= {name: RemoteRank(name, epoch) for name in names if name in self._ranks}
        self._failure = None
        self._order(end=[*names], epoch=epoch, failure=Failure.of(failure), meet=meet)

    def bury(self) -> None:
        for rank in self._ranks.values():
            if rank.code is None:
                rank.process.returncode = -signal.SIGKILL

    def meet_again(self, stream: MessageStream, epoch: int) -> None:
        self.stream, self.life, self._gone, self._failed_at = stream, epoch, "", None

    def start(self, names: Sequence[str], place: str) -> None:
        self._order(start=[*names], place=place)

    def give(self, word: Word) -> None:
        self._order(word=word)

    def went_on(self, step: int, replayed: int) -> None:
        self._order(went_on=(step, replayed))

    def dismiss(self) -> None:
        self._order(over=True)

    def give_up(self, failure: ProcessFailed | None) -> None:
        self._order(gave_up=True, failure=failure and Failure.of(failure))

    def _order(self, **what: Any) -> None:
        send(self.stream, Order(self.life, **what))
