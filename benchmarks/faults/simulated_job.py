"""A launcher and its processes in the simulation: the real job and replacing, and processes that are threads.

    Supervisor, Job, Replacing, CrewHere   real, on an actor of their own
    guard, processes                       in the places of those that would start interpreters

A process finds in os.environ what its launcher has given it whenever it is its turn. What it notes is a real file, what
it keeps real memory.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.simulated import PromiseBroken
from benchmarks.faults.simulated_network import TIMEOUT_S, Network
from benchmarks.faults.turns import Actor, Killed, Turns
from common.commit.kept_parts import KEPT_VARIABLE, path_of
from common.errors import GradSyncError, RecoveryFailed
from common.launch.child import Child, ProcessFailed
from common.launch.job import Job
from common.launch.replacing import Replacing
from common.launch.restarts import Supervisor
from common.system.leftovers import Session
from common.system.next_epoch import WORD_VARIABLE, word_in
from common.system.process import JOB_SECRET_VARIABLE, JOINED_VARIABLE, LAST_WORDS_VARIABLE, RESTARTS_VARIABLE

__all__ = [
    "VARIABLES",
    "Landlord",
    "SimulatedGuard",
    "SimulatedJob",
    "SimulatedProcess",
    "Watched",
    "WatchedSupervisor",
]

OWN_VARIABLES = (RESTARTS_VARIABLE, JOINED_VARIABLE)  # that are another's for each process, or change
BOUNDARY = "no step boundary"  # that all ranks have; two of each rank are enough, whatever happens
VARIABLES = (*OWN_VARIABLES, KEPT_VARIABLE, WORD_VARIABLE, JOB_SECRET_VARIABLE)


class Landlord:
    """What processes of a seed have together.

    Args:
        kills: numbers of moments, at which whoever is there dies.
        freezes: for how many seconds whoever is there freezes, by numbers of moments.
        nranks, steps: of the training.

    Attributes:
        inside: whose variables os.environ holds.
        replaceable: how many died before anybody could be done.
        kept: steps that each rank has kept since all began anew, and not gone back behind.
        hurt: who was killed or frozen, and not replaced since.
    """

    def __init__(
        self,
        turns: Turns,
        network: Network,
        kills: Sequence[int],
        freezes: Mapping[int, float],
        nranks: int,
        steps: int,
    ) -> None:
        self.turns, self.network, self.kills, self.freezes = turns, network, frozenset(kills), freezes
        self._nranks, self._steps = nranks, steps
        self.inside: SimulatedProcess | None = None
        self.living: list[SimulatedProcess] = []
        self.moments = self.killed = self.frozen = self.replaceable = 0
        self.kept: dict[int, int] = {}
        self.replaced_at = 0.0
        self.hurt: list[SimulatedProcess] = []

    def lose(self, process: SimulatedProcess) -> None:
        self.killed += 1
        self.hurt.append(process)
        self.replaceable += self.kept.get(process.rank, 0) < self._steps

    def longest_freeze(self, process: SimulatedProcess) -> float:
        """Without an end of the job: when a group is the first one, who is missing there has not been what was asked
        for."""
        return TIMEOUT_S / 2 if not process.born and len(self.kept) < self._nranks else math.inf

    def were_replaced(self, names: Sequence[str]) -> None:
        self.replaced_at = self.turns.now
        self.hurt = [process for process in self.hurt if f"rank {process.rank}" not in names]

    def is_whole(self) -> bool:
        """Whether nothing has happened to anybody but those who were replaced."""
        asleep = [process for process in self.hurt if process.frozen_until > self.replaced_at]
        dead = [process for process in self.hurt if process.code is not None]
        return not (asleep or dead or self.network.hurt_at > self.replaced_at)


class SimulatedProcess(Actor):
    """Stands for subprocess.Popen.

    Args:
        program: what it runs.
    """

    stdin = stdout = None

    def __init__(
        self,
        landlord: Landlord,
        rank: int,
        pid: int,
        environment: Mapping[str, str],
        program: Callable[[SimulatedProcess], None],
    ) -> None:
        super().__init__(landlord.turns, lambda: self._live(program))
        self.landlord, self.rank, self.pid = landlord, rank, pid
        self.environment = {name: environment.get(name, "") for name in VARIABLES}
        self._words = Path(environment[LAST_WORDS_VARIABLE])
        self.code: int | None = None
        self.born = int(self.environment[RESTARTS_VARIABLE])  # in that epoch
        self.was_ended_awake = False
        self._seen_at = 0.0
        landlord.living.append(self)

    @property
    def returncode(self) -> int | None:
        return self.code

    @property
    def is_frozen(self) -> bool:
        return self.code is None and self.frozen_until > self.landlord.turns.now

    def poll(self) -> int | None:
        """Its launcher sees an end some time after the others."""
        return None if self.code is None or self.landlord.turns.now < self._seen_at else self.code

    def wait(self, timeout: float | None = None) -> int | None:  # noqa: ARG002 - it has ended
        self._seen_at = 0.0
        return self.code

    def kill(self) -> None:
        self.end_with(signal.SIGKILL)

    def end_with(self, number: int) -> None:
        """By its launcher."""
        self.was_ended_awake = self.code is None and not self.is_frozen
        self.die(-number)

    def begins(self) -> None:
        """Find in os.environ what is this process's."""
        if self.landlord.inside is self:
            return
        if before := self.landlord.inside:
            before.environment[RESTARTS_VARIABLE] = os.environ[RESTARTS_VARIABLE]
        for name in OWN_VARIABLES if self.waits else VARIABLES:
            os.environ[name] = self.environment[name]
        self.landlord.inside = self

    def moment(self, what: str) -> None:
        """
        Raises:
            Killed: it is to die at this one.
        """
        self.landlord.moments += 1
        if seconds := self.landlord.freezes.get(self.landlord.moments):
            self.freeze(seconds, f"as it {what}")
            self.landlord.turns.sleep(self, self.frozen_until - self.landlord.turns.now)
        if self.landlord.moments in self.landlord.kills:
            self.murder(f"as it {what}")
            raise Killed

    def freeze(self, seconds: float, when: str) -> None:
        """The others miss it when it has given no sign of life for so long."""
        turns, network = self.landlord.turns, self.landlord.network
        seconds = min(seconds, self.landlord.longest_freeze(self))
        network.tell(f"rank {self.rank} is frozen for {seconds:g} s {when}")
        self.frozen_until = turns.now + seconds
        self.landlord.frozen += 1
        self.landlord.hurt.append(self)
        if seconds > TIMEOUT_S:
            turns.at(turns.now + TIMEOUT_S, self._is_missed)

    def _is_missed(self) -> None:
        if self.is_frozen:
            for transport in self.landlord.network.of(self):
                transport.stall()

    def murder(self, when: str) -> None:
        """By nobody who belongs to the job."""
        self.landlord.network.tell(f"rank {self.rank} is killed {when}")
        self.landlord.lose(self)
        late = self.landlord.network.story.rng.choice((0.0, 0.0, 0.0, 0.3))
        self.die(-signal.SIGKILL, late)

    def die(self, code: int, late: float = 0.0) -> None:
        """End as the system ends it: nothing that it runs has another turn."""
        if self.code is not None:
            return
        self.code, self._seen_at = code, self.landlord.turns.now + late
        self.landlord.living.remove(self)
        self.is_killed = True
        for transport in self.landlord.network.of(self):
            transport.die()
        self.landlord.turns.wake(self, self.landlord.turns.now)

    def _live(self, program: Callable[[SimulatedProcess], None]) -> None:
        """Until its end, as `run_command` has it."""
        try:
            program(self)
            code = 0
        except PromiseBroken:
            raise
        except GradSyncError as exc:
            self.landlord.network.tell(f"rank {self.rank} ends with {type(exc).__name__}: {exc}")
            if isinstance(exc, RecoveryFailed) and (BOUNDARY in str(exc) or self.landlord.is_whole()):
                raise PromiseBroken(f"rank {self.rank} gives up: {exc}") from exc
            self._words.write_text(f"{type(exc).__name__}: {exc}\n")
            code = exc.exit_code
        self.code = code
        self.landlord.living.remove(self)


@dataclass
class SimulatedChild(Child):
    """Reads the process's notes anew only if that had a turn since."""

    process: Any
    _read_at: tuple[int, int | None] = (-1, None)
    _notes_then: str = ""

    @property
    def told(self) -> str:
        now = (self.process.waits, self.process.code)
        if now != self._read_at:
            self._read_at, self._notes_then = now, super().told
        return self._notes_then

    def is_frozen(self) -> bool:
        return bool(self.process.is_frozen)

    def has_ended(self, now: float) -> None:
        """It had started nobody."""
        self.ended_at = now

    def look(self) -> None:
        """It has no memory of its own."""


class SimulatedGuard:
    """In the place of the process beside the launcher; starts simulated ones."""

    parent = 0

    def __init__(
        self, folder: Path, start: Callable[[str, Sequence[str], Mapping[str, str]], SimulatedProcess]
    ) -> None:
        folder.mkdir()
        self.folder, self._start = folder, start

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        streams: Mapping[str, Any],  # noqa: ARG002
        about: Any,  # noqa: ARG002
    ) -> SimulatedProcess:
        return self._start(name, command, environment)

    def hold(self, name: str, descriptor: int) -> str:  # noqa: ARG002
        return path_of(descriptor)


class SimulatedJob(Job):
    def __enter__(self) -> SimulatedJob:
        self._guard = self.life.beside()
        self._logs = self.scratch
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self.children)
        for descriptor in self.kept.values():
            os.close(descriptor)

    def _take(self, name: str, process: Any, log: Path | None) -> None:
        session = Session(process.pid, None)
        self.children.append(
            SimulatedChild(name, process, session, log, self._file("words", name), self._file("notes", name))
        )

    def _end(self, children: Sequence[Child]) -> None:
        for child in children:
            child.process.end_with(signal.SIGTERM)  # type: ignore[attr-defined]


@dataclass
class WatchedSupervisor(Supervisor):
    """Holds that nobody makes more than one step again where the others go on."""

    landlord: Landlord = field(kw_only=True)
    make_guard: Callable[[], Any] = field(kw_only=True)
    recovered: int = 0  # times that the others went on, and all were one group again

    def beside(self) -> Any:
        return self.make_guard()

    def replace(self, failure: ProcessFailed, names: Sequence[str]) -> None:
        super().replace(failure, names)
        self.landlord.were_replaced(names)

    def tell_of_replaying(self, step: int, replayed: int) -> None:
        if replayed > 1:
            raise PromiseBroken(f"{replayed} steps are made again after step {step}")
        self.recovered += 1
        super().tell_of_replaying(step, replayed)


@dataclass
class Watched:
    """What a job asks whether anything is being mended, and whether that keeps its promises."""

    job: Job
    replacing: Replacing
    landlord: Landlord
    _given: int = 0  # the epoch of the last word

    def look(self) -> bool:
        new = self.replacing._replaced or ()  # these are started once more where one of them dies
        before = [child for child in list[Any](self.job.children) if child.name not in new]
        is_mended = self.replacing.look()
        if is_mended:
            noticed = self.replacing._noticed_at
            in_time = noticed is None or self.landlord.turns.now <= noticed + TIMEOUT_S
            if ended := [child.name for child in before if child.process.was_ended_awake and in_time]:
                raise PromiseBroken(f"{' and '.join(ended)} lived, and was ended")
            if (word := word_in(self.job.word_file)) and word.rendezvous and word.epoch > self._given:
                self._check_who_is_there(word.epoch, self._given)
                self._given = word.epoch
        return is_mended

    def _check_who_is_there(self, epoch: int, before: int) -> None:
        """When this word is given, after that of epoch `before`, whoever goes on waits for it, and whoever was started
        has come."""
        for child in list[Any](self.job.children):
            born = child.process.born
            is_there = child.has_joined() if born == epoch else child.waits_for() > max(born, before)
            if child.code is None and not is_there:
                raise PromiseBroken(f"the word of epoch {epoch} was given before {child.name} was there")
