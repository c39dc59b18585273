"""The processes of a host, as whoever replaces the dead among them sees them, and what is done with them
(replacing.py): of this host, or of another one, whose launcher is told (remote_crew.py)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.commit.kept_parts import has_kept
from common.errors import PeerError
from common.launch.child import Child, ProcessFailed
from common.launch.job import Job
from common.network.message_stream import MessageStream
from common.system.next_epoch import Word

__all__ = ["HEARING_S", "Crew", "CrewHere", "lost"]

HEARING_S = 0.5  # from the end of a process until all have heard of it who were connected with it


def died_early(child: Child) -> bool:
    """Whether a signal has killed this rank before its group was complete."""
    return child.name.startswith("rank") and (child.code or 0) < 0 and not child.is_in_group()


def lost(gone: str) -> ProcessFailed | None:
    """The failure that a launcher is gone, in words; None: none is."""
    return ProcessFailed(gone, PeerError.exit_code, joined=True) if gone else None


class Crew(ABC):
    """Names are those of processes; a host is given those of all hosts, and takes its own.

    Attributes:
        gave_up: that host's launcher starts all again.
    """

    gave_up = False

    @abstractmethod
    def hear(self) -> None:
        """Take in what is new of them."""

    @property
    @abstractmethod
    def children(self) -> Sequence[Child]: ...

    @property
    @abstractmethod
    def gone(self) -> str:
        """Why nothing can be done with them any more, in words; "": something can."""

    @abstractmethod
    def has_kept(self, child: Child) -> bool:
        """Whether it has left something to whoever takes its place."""

    @abstractmethod
    def failure(self) -> ProcessFailed | None:
        """Of those that have failed the one that did so first; None: none has."""

    @abstractmethod
    def kill(self, child: Child) -> None:
        """It must not wake up and write into what is no more."""

    @abstractmethod
    def end(self, failure: ProcessFailed, names: Sequence[str], epoch: int, *, meet: bool = False) -> None:
        """What the dead have started, too, since others take their places, in that epoch.

        Args:
            meet: before anything else, the launchers meet again, since one is gone.
        """

    def bury(self) -> None:  # noqa: B027 - this host's launcher is there
        """Nothing more comes from its launcher: its ranks count as dead."""

    def meet_again(self, stream: MessageStream, epoch: int) -> None:  # noqa: B027 - likewise
        """The launchers have met again, in that epoch; whoever stands for that host now is at the other end of it."""

    @abstractmethod
    def start(self, names: Sequence[str], place: str) -> None:
        """These ranks, which meet the others at that place."""

    @abstractmethod
    def give(self, word: Word) -> None:
        """To those that live."""

    @abstractmethod
    def went_on(self, step: int, replayed: int) -> None:
        """All go on after that step."""

    @property
    def is_over(self) -> bool:
        """Whether all have ended well."""
        return all(child.code == 0 for child in self.children)

    @abstractmethod
    def dismiss(self) -> None:
        """Those of all hosts have ended well."""

    @abstractmethod
    def give_up(self, failure: ProcessFailed | None) -> None:
        """All are to be started again, because of that."""


@dataclass
class CrewHere(Crew):
    """Those of this host.

    Args:
        start_rank: starts one that meets the others at that place, or at servers with these addresses.
        first: where all meet at first.
    """

    job: Job
    start_rank: Callable[[int, str], None]
    first: str = ""
    clock: Callable[[], float] = time.monotonic
    life: int = field(init=False)  # the epoch in which all were started
    begun: dict[str, int] = field(default_factory=dict)  # the epochs in which those were started that took a place
    _gave_up_at: float = 0.0
    _missed_since: float | None = None  # who is dead, and had begun to join
    _why: ProcessFailed | None = None

    def __post_init__(self) -> None:
        self.life = self.job.life.number

    def hear(self) -> None:
        """Nothing is: it is looked up."""

    @property
    def children(self) -> Sequence[Child]:
        return self.job.children

    @property
    def gone(self) -> str:
        return ""

    @property
    def has_met(self) -> bool:
        """Whether all ranks are in a complete group, and so notice themselves whose launcher is lost."""
        return all(child.is_in_group() for child in self.children if child.name.startswith("rank"))

    def has_kept(self, child: Child) -> bool:
        return has_kept(self.job.kept[child.name])

    def failure(self) -> ProcessFailed | None:
        return self.job.failure() if any(child.code for child in self.children) else None

    def kill(self, child: Child) -> None:
        child.process.kill()
        child.process.wait()

    def start_over(self) -> bool:
        """Whether the dead need only be started again: ranks that a signal has killed before their first group was
        complete, in which the others still wait for them. Of one that had begun to join they may hear, and say so.

        Raises:
            RecoveryFailed: no restart is left.
        """
        dead = [child for child in self.children if child.code is not None]
        others_wait = not any(child.code is None and child.waits_for() >= 0 for child in self.children)
        if not (dead and self.first and others_wait and all(map(died_early, dead))):
            self._missed_since = None
            return False
        if any(child.has_joined() for child in dead):
            self._missed_since = self.clock() if self._missed_since is None else self._missed_since
            if self.clock() < self._missed_since + HEARING_S:
                return True
        self._missed_since = None
        names, failure = [child.name for child in dead], self.job.failure()
        if not self.job.life.start_over(failure, names):
            return False
        self.end(failure, names, self.job.life.number)
        self.start(names, self.first)
        return True

    def end(self, failure: ProcessFailed, names: Sequence[str], epoch: int, *, meet: bool = False) -> None:  # noqa: ARG002 - it was told of
        for child in [child for child in self.children if child.name in names]:
            self.job.end(child.process)
            child.joined.unlink(missing_ok=True)
            self.begun[child.name] = epoch

    def start(self, names: Sequence[str], place: str) -> None:
        for name in names:
            role, _, number = name.partition(" ")
            lives = any(child.name == name and child.code is None for child in self.children)  # on a host that has come
            if role == "rank" and name in self.job.kept and not lives:
                self.start_rank(int(number), place)

    def give(self, word: Word) -> None:
        word.give(self.job.word_file)

    def went_on(self, step: int, replayed: int) -> None:
        self.job.life.went_on(step, replayed)

    def dismiss(self) -> None:
        """Nothing is left to do."""

    def give_up(self, failure: ProcessFailed | None) -> None:
        self._gave_up_at, self._why = self.clock(), failure

    def leave(self, since: float | None) -> bool:
        """After `give_up`: whether these may still say themselves what has failed.

        Args:
            since: when something was seen to be wrong.

        Raises:
            ProcessFailed: why all are started again, once one waits or all have had the time to say something.
        """
        if any(child.code for child in self.children):
            return False
        waiting = [child for child in self.children if self._waits(child)]
        if not waiting and self.clock() < self._gave_up_at + self.job.settle:
            return True
        self.job.kill_the_frozen()
        if self._why:
            raise self._why
        says = f"{waiting[0].name} says: {waiting[0].why_it_waits()}" if waiting else ""
        words = says or "processes of another host have failed"
        raise ProcessFailed(words, PeerError.exit_code, since=since, joined=True)

    def _waits(self, child: Child) -> bool:
        """For an epoch that it has not begun."""
        epoch = child.waits_for()
        return child.code is None and epoch > self.life and child.went_on(epoch) is None
