"""Starts a job again when a process of it has died or stalled: `--max-restarts`, `--restart-window`.

    life 0:  processes start, join, train ... one dies  ->  the others are ended  ->  life 1: all start anew

Each life is a `Job` of its own, with fresh segments, secrets and meeting points, and its number is the epoch of its
groups: whoever is left of an earlier one is refused. The processes find it in GRADSYNC_RESTARTS, and resume from the
last commit, or begin anew. Launchers of several hosts agree on the epoch before each further life.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.errors import CertificateFailed, PeerError, RecoveryFailed, UsageError
from common.launch.adoption import Adoption, KeptJob
from common.launch.child import MISSING, Child, ProcessFailed
from common.launch.guard import Guard

__all__ = ["Life", "RestartFlags", "supervise"]

HOPELESS = re.compile(r"\bNonFiniteGradient: ")  # whoever computes it again ends there again
# of a Supervisor, for the next launcher
STATE = ("epoch", "causes", "parts", "replayed", "lost_s", "_born", "_recent", "_failed_at", "_begun", "_mends")
CODES = (UsageError.exit_code, CertificateFailed.exit_code)  # likewise
# not so: a link may come back; who was killed when the last one had come is still counted among those that meet, and
# may have ended while another one called. Nor what is MISSING, once the job has lost one, or where one is seen to be
# frozen: whoever was waited for may be that one, or slow
PASSING = re.compile(
    r"\b(PeerUnreachable: .* has acknowledged nothing for |RendezvousError: \w+ \d+ joined twice"
    r"|(RendezvousError: rank \d+ at|PeerUnreachable: .*: its data port) \S+ (did not let rank \d+ in \(the connection"
    r" was closed|was not reached within \S+ s \(Connection re(fused|set)))"
)


@dataclass(frozen=True, kw_only=True)
class RestartFlags:
    """When a process has died or stalled."""

    max_restarts: int = 0
    """How often the job is started again after a process has died or stalled."""
    restart_window: float = 0.0
    """Only restarts of so many last seconds count; 0: all."""
    adopt_for: float = 0.0
    """When the launcher has died: how many seconds its processes go on, in which the same command takes them over.
    Needs --log-dir."""

    @property
    def asked_for(self) -> dict[str, float | None]:
        """The flags that are more than a default."""
        return {"max-restarts": self.max_restarts or None, "adopt-for": self.adopt_for or None}

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts must be at least 0 (got {self.max_restarts})")
        if not 0 <= self.restart_window < float("inf"):
            raise UsageError(f"--restart-window must be a number of seconds, at least 0 (got {self.restart_window})")
        if not 0 <= self.adopt_for < float("inf"):
            raise UsageError(f"--adopt-for must be a number of seconds, at least 0 (got {self.adopt_for})")
        if self.restart_window and not self.max_restarts:
            raise UsageError("--restart-window needs --max-restarts: how many restarts may it hold?")


@dataclass
class Life:
    """One of a job's.

    Args:
        number: how often the job has been started again before.
        whole: called once, as soon as the group of this host's ranks is complete.
        supervisor: decides on replacing ranks; None: none is.
        is_mended: ranks were being replaced when its last launcher died.
        is_whole: that was told.
        awaits: some were started again before they had joined.
    """

    number: int = 0
    whole: Callable[[], None] = lambda: None
    supervisor: Supervisor | None = None
    is_mended: bool = False
    is_whole: bool = False
    awaits: bool = False

    def beside(self) -> Guard | KeptJob:
        """A process beside the launcher, for this life."""
        return self.supervisor.beside() if self.supervisor else Guard()

    def is_under_way(self) -> None:
        """All processes have been started."""
        if self.supervisor:
            self.supervisor.note()

    def ends(self) -> None:
        """They are ended now."""
        if self.supervisor:
            self.supervisor.note_end()

    def look(self, children: Sequence[Child]) -> None:
        if (self.number or self.awaits) and not self.is_whole:
            ranks = [child for child in children if child.name.startswith("rank")]
            if all(rank.is_in_group() for rank in ranks):
                self.is_whole = True
                self.whole()

    def replace(self, failure: ProcessFailed, names: Sequence[str]) -> bool:
        """Whether these ranks may be started again while the others go on; then this is the next life, in which they
        do.

        Raises:
            RecoveryFailed: no restart is left.
        """
        if self.supervisor is None or self.supervisor.sees_no_hope(failure):
            return False
        self.supervisor.replace(failure, names)
        self.number, self.is_whole = self.supervisor.epoch, True
        return True

    def start_over(self, failure: ProcessFailed, names: Sequence[str]) -> bool:
        """Whether these ranks, which had not joined yet, may be started again while the others wait for them.

        Raises:
            RecoveryFailed: no restart is left.
        """
        if self.supervisor is None or self.supervisor.sees_no_hope(failure):
            return False
        self.supervisor.start_over(failure, names)
        self.awaits, self.is_whole = True, False
        return True

    def say(self, what: str) -> None:
        """On the launcher's terminal."""
        if self.supervisor:
            self.supervisor.say(what)

    def went_on(self, step: int, replayed: int) -> None:
        """All ranks go on after that step; so many that were complete are made again."""
        assert self.supervisor
        self.supervisor.tell_of_replaying(step, replayed)


def no_other_host(epoch: int) -> int:
    return epoch


def supervise(
    flags: RestartFlags,
    live: Callable[[Life], None],
    *,
    prog: str,
    agree: Callable[[int], int] = no_other_host,
    epoch: int = 0,
    clock: Callable[[], float] = time.monotonic,
    adoption: Adoption | None = None,
) -> None:
    """Call `live` until it returns: its processes have ended well.

    Args:
        live: starts a job's processes and waits for them; leaves none of them, whatever it raises.
        agree: with the launchers of other hosts; given the next epoch as this one sees it, blocks until all know the
            greatest.
        epoch: of the job when this launcher came; more than 0 where it comes to a job that is under way on other hosts.
        adoption: how the job outlives this launcher; None: it does not. One that has outlived another is taken over.

    Raises:
        ProcessFailed: a process failed in a way that a restart cannot cure, or none was asked for.
        RecoveryFailed: the restarts are used up, or other hosts did not restart too.
    """
    Supervisor(flags, prog, agree, clock, epoch, adoption=adoption).run(live)


@dataclass
class Supervisor:
    """See `supervise`."""

    flags: RestartFlags
    prog: str
    agree: Callable[[int], int]
    clock: Callable[[], float]
    epoch: int = 0
    causes: list[str] = field(default_factory=list)  # of all restarts
    parts: int = 0  # of these, those in which the others went on
    replayed: int = 0  # steps, in these
    lost_s: float = 0.0
    adoption: Adoption | None = None
    _kept: KeptJob | None = None  # the job, where it outlives this launcher
    _born: int = 0  # the epoch with which the present processes were started, but those that were replaced
    _recent: list[float] = field(default_factory=list)  # when restarts were made that count
    _failed_at: float = 0.0
    _begun: float = 0.0
    _mends: bool = False  # a failure that nothing has recovered from yet
    _started_over: bool = False  # before the group was complete
    _alone: bool = False  # likewise, in this life: if that was too late for the others, it takes no further restart

    def run(self, live: Callable[[Life], None]) -> None:
        if self.epoch:
            self.say(f"this host joins a job that has lost one, in epoch {self.epoch}")
        life = self._adopted()
        while True:
            try:
                live(life or self._next())
                break
            except ProcessFailed as failure:
                if not self.flags.max_restarts or self.sees_no_hope(failure):
                    raise
                self._restart(failure)
                life = None
        if self.causes:
            count = f"{len(self.causes)} restart{'s' * (len(self.causes) > 1)}"
            if self.parts:
                count += f" ({self.parts} of a part, {steps_of(self.replayed)} replayed)"
            self.say(f"complete after {count}, which took {self.lost_s:.1f} s: {'; '.join(self.causes)}")

    def _next(self) -> Life:
        self._begun, self._born = self.clock(), self.epoch
        return Life(self.epoch, self._tell_recovery, self)

    def _adopted(self) -> Life | None:
        """Of a job that has outlived its launcher; None: there is none."""
        self._kept = self.adoption.find() if self.adoption else None
        if self._kept is None:
            return None
        for name in STATE:
            setattr(self, name, self._kept.notes["state"][name])
        ago = time.monotonic() - (self._kept.died_at or 0.0)
        self.say(
            f"takes over the job of launcher {self._kept.launcher}, which died {ago:.1f} s ago: "
            f"{', '.join(self._kept.members)} (epoch {self.epoch})"
        )
        return Life(
            self.epoch,
            self._tell_recovery,
            self,
            is_mended=self._mends and self.epoch > self._born,
            is_whole=not self._mends or self.epoch > self._born,
        )

    def sees_no_hope(self, failure: ProcessFailed) -> bool:
        return is_hopeless(failure, again=bool(self.epoch or self.causes))

    def beside(self) -> Guard | KeptJob:
        """A process beside this one, which clears away after it; with --adopt-for, only if no other takes its place."""
        if self.adoption is None:
            return Guard()
        if self._kept is None:
            self._kept = self.adoption.begin(further=self.epoch > 0)
        return self._kept

    def note(self) -> None:
        """What a next launcher has to know."""
        if self.adoption and self._kept:
            state = {name: getattr(self, name) for name in STATE}
            self._kept.note({"command": self.adoption.command, "state": state})

    def note_end(self) -> None:
        """There is nothing to be taken over any more."""
        if self._kept:
            self._kept.note(None)
            self._kept = None

    def replace(self, failure: ProcessFailed, names: Sequence[str]) -> None:
        """Count that these ranks are started again, in the next epoch.

        Raises:
            RecoveryFailed: they may not be.
        """
        number = self._take_restart(failure)
        started = f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} started again ({number})"
        done = f"{started}, the others go on" if names else f"all live, and meet again ({number})"
        self.say(f"{failure.cause}, {self._after()}; {done}")
        self.epoch += 1
        self.parts += 1
        self._count(failure)
        self.note()

    def start_over(self, failure: ProcessFailed, names: Sequence[str]) -> None:
        """Count that these ranks are started again in this epoch.

        Raises:
            RecoveryFailed: they may not be.
        """
        number = self._take_restart(failure)
        started = f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} started again ({number})"
        self.say(f"{failure.cause}, {self._after()}; {started}, the others wait")
        self.parts += 1
        self._count(failure)
        self._started_over = self._alone = True
        self.note()

    def _restart(self, failure: ProcessFailed) -> None:
        """
        Raises:
            RecoveryFailed: it may not be.
        """
        follows, self._alone = self._alone and bool(self._recent) and tells_of_another(failure), False
        number = f"still restart {len(self._recent)}" if follows else self._take_restart(failure)
        ended = f"the others ended within {self.clock() - self._failed_at:.1f} s"
        self.say(f"{failure.cause}, {self._after()}; {ended}; starting all again ({number})")
        try:
            self.epoch = self.agree(self.epoch + 1)
        except UsageError as exc:
            raise RecoveryFailed(f"{failure.cause}; then the launchers of all hosts did not meet: {exc}") from exc
        if follows:
            self.parts -= 1
        else:
            self._count(failure)

    def _take_restart(self, failure: ProcessFailed) -> str:
        """Which one it is, in words.

        Raises:
            RecoveryFailed: none is left.
        """
        since = self.clock() if failure.since is None else failure.since
        self.lost_s += since - self._failed_at if self._mends else 0.0
        self._failed_at, self._mends = since, True
        most, window = self.flags.max_restarts, self.flags.restart_window
        while window and self._recent and self._recent[0] < self.clock() - window:
            del self._recent[0]
        if len(self._recent) >= most:
            within = f" --restart-window {window:g}" if window else ""
            _, line, rest = failure.whole.partition("\n")
            vain = f"{most} restart{'s' * (most > 1)} did not help (--max-restarts {most}{within})"
            raise RecoveryFailed(f"{vain}; last, {failure.cause}{line}{rest}") from failure
        return f"restart {len(self._recent) + 1} of {most}" + (f" in {window:g} s" if window else "")

    def _count(self, failure: ProcessFailed) -> None:
        self._recent.append(self.clock())
        self.causes.append(failure.cause)

    def _after(self) -> str:
        return f"{self._failed_at - self._begun:.1f} s after its start"

    def tell_of_replaying(self, step: int, replayed: int) -> None:
        """That the group goes on after this step."""
        self.replayed += replayed
        since = f", {self._recovered():.1f} s after that" if self._mends else ""  # not where this host came later
        self.say(f"recovered: all go on after step {step:,}, {steps_of(replayed)} replayed{since} (epoch {self.epoch})")

    def _tell_recovery(self) -> None:
        how = ", 0 steps replayed" if self._started_over else " again"
        since = f", {self._recovered():.1f} s after that" if self._mends else ""
        self._started_over = self._alone = False
        self.say(f"recovered: the group is complete{how}{since} (epoch {self.epoch})")

    def _recovered(self) -> float:
        """How many seconds after the last failure."""
        lost, self._mends = self.clock() - self._failed_at, False
        self.lost_s += lost
        self.note()
        return lost

    def say(self, what: str) -> None:
        print(f"{self.prog}: {what}", file=sys.stderr, flush=True)


def steps_of(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def tells_of_another(failure: ProcessFailed) -> bool:
    """It failed because another process had been lost."""
    told = PASSING.search(failure.cause) or MISSING.search(failure.cause)
    return failure.exit_code == PeerError.exit_code or bool(told)


def is_hopeless(failure: ProcessFailed, *, again: bool = False) -> bool:
    """A restart would come to the same end: what was asked for cannot work, or the program ended with an error of its
    own before it joined, as for a module that is not there.

    Args:
        again: some were started again before: whoever is missing was there once, or comes late.
    """
    curable = PASSING.search(failure.cause) or ((again or failure.is_of_frozen) and MISSING.search(failure.cause))
    return (
        (failure.exit_code in CODES and not curable)
        or bool(HOPELESS.search(failure.cause))
        or not (failure.joined or failure.by_signal or failure.exit_code == PeerError.exit_code)
    )
