"""A job of a ring whose ranks die, freeze and are replaced, over links that are late: one seed, no real clock.

    turns.py               threads of which one runs at a time, and the clock
    simulated_network.py   links, meetings, and messages that go wrong
    simulated_job.py       the launcher and its processes
    simulated_rank.py      what is trained, and what a rank does
    here                   the seed, and what is promised

Real are the ring and its tags, what ranks keep of each step and agree on, and all that a launcher decides: whom it
replaces, when it gives the word, when all begin anew. What a seed draws:

    killed   (nobody's plan) a rank dies at any moment: as it sends, receives, keeps a step, joins, or waits
    frozen   for less than the timeout or more
    wrong    messages doubled, overtaken, or of an old epoch
    late     every message; who is started may take long to come, who computes may take long to notice

What is promised: all ranks end with the bits of a run to which nothing happens, or the job with RecoveryFailed once its
restarts are used up. Where one dies and nothing else happens, the others go on, as soon as all have kept a step; they
make at most one step again. No message is taken that is wrong or of an
old epoch, and none refused that is right. No rank's step is twice in one result. Nothing waits for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.faults.simulated import PromiseBroken, Story
from benchmarks.faults.simulated_job import (
    VARIABLES,
    Landlord,
    SimulatedGuard,
    SimulatedJob,
    SimulatedProcess,
    Watched,
    WatchedSupervisor,
)
from benchmarks.faults.simulated_network import TIMEOUT_S, Network
from benchmarks.faults.simulated_rank import Finished, Rank, Setting
from benchmarks.faults.turns import Actor, Turns
from common.errors import RecoveryFailed
from common.launch.child import ProcessFailed
from common.launch.replacing import Replacing
from common.launch.restarts import Life, RestartFlags
from common.system.fault_points import FAULT_HERE_VARIABLE

__all__ = ["SimulatedRing", "simulate_ring"]

PROG = "collective.run"


@dataclass(frozen=True)
class SimulatedRing:
    """What a seed has come to.

    Args:
        end: "complete", or the error with which the job ended.
        digest: of the parameters; "" if the job did not end well.
        history: SHA-256 of all that happened, in order.
        kills, freezes: of ranks.
        recovered: times that some were replaced, and all went on together.
        restarted: times that all began anew.
        refused: messages, by what was wrong with them.
    """

    end: str
    digest: str
    history: str
    kills: int
    freezes: int
    recovered: int
    restarted: int
    refused: Mapping[str, int]


class Lines(io.TextIOBase):
    """What a launcher writes on its terminal, line by line."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._begun = tell, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._tell(line)
        return len(text)


class RingSimulation:
    """
    Args:
        folder: for the launcher's files.
        log: is told of everything that happens.

    Attributes:
        finished: what each rank has in the end.
    """

    def __init__(self, seed: int, turns: Turns, folder: Path, log: Callable[[str], object]) -> None:
        self.turns, self.story, self._folder = turns, Story(seed, log), folder
        self.setting = Setting.drawn(seed, self.story.rng)
        self.network = Network(turns, self.story, self.setting.wrong)
        self.landlord = Landlord(
            turns,
            self.network,
            self.setting.kills,
            dict(self.setting.freezes),
            self.setting.nranks,
            self.setting.steps,
        )
        self.finished: Finished = {}
        self.launcher = Actor(turns, self._launch)
        self.supervisor = WatchedSupervisor(
            RestartFlags(max_restarts=self.setting.max_restarts),
            PROG,
            lambda epoch: epoch,
            turns.clock,
            landlord=self.landlord,
            make_guard=self._make_guard,
        )
        self._lives = self._started = 0
        self._end = ""

    def run(self) -> SimulatedRing:
        """
        Raises:
            PromiseBroken: naming what and where.
        """
        setting = self.setting
        self.network.tell(f"{setting.nranks} ranks, {setting.steps} steps, {setting.max_restarts} restarts")
        self.turns.add(self.launcher, 0.0)
        for moment in setting.kill_times:
            self.turns.at(moment, self._kill)
        for moment, seconds in setting.freeze_times:
            self.turns.at(moment, partial(self._freeze, seconds))
        self.turns.run()
        return SimulatedRing(
            self._end,
            self._judge(),
            self.story.history,
            self.landlord.killed,
            self.landlord.frozen,
            self.supervisor.recovered,
            self._lives - 1,
            self.network.refused,
        )

    def _launch(self) -> None:
        """The launcher."""
        try:
            self.supervisor.run(self._live)
            self._end = "complete"
        except (ProcessFailed, RecoveryFailed) as exc:
            self._end = type(exc).__name__
            self.network.tell(f"{self._end}: {exc}")
        self.turns.finish()

    def _live(self, life: Life) -> None:
        self._lives += 1
        self.finished.clear()
        self.landlord.kept.clear()
        self.landlord.hurt.clear()
        with SimulatedJob(
            life=life,
            keeps=bool(self.setting.max_restarts),
            begins=True,
            clock=self.turns.clock,
            pause=self._pause,
            calm_pause=self._pause,
        ) as job:

            def start(rank: int, place: str) -> None:
                job.start(f"rank {rank}", [str(rank), place], log="", on_terminal=True)

            if job.keeps:
                replacing = Replacing(job, start, TIMEOUT_S, first=f"life {self._lives}", clock=self.turns.clock)
                job.mends = Watched(job, replacing, self.landlord).look
            for rank in range(self.setting.nranks):
                start(rank, f"life {self._lives}")
            job.wait()

    def _pause(self, *_: object) -> None:
        self.turns.sleep(self.launcher, self.story.rng.uniform(0.05, 0.25))

    def _make_guard(self) -> SimulatedGuard:
        return SimulatedGuard(self._folder / f"life {self._lives}", self._start)

    def _start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> SimulatedProcess:
        _, rank, place = command
        self._started += 1

        def run(process: SimulatedProcess) -> None:
            Rank(process, self.setting, place, self.finished).run()

        process = SimulatedProcess(self.landlord, int(rank), self._started, environment, run)
        late = self.story.rng.expovariate(4.0) + (2 * TIMEOUT_S if self._is_slow() else 0.0)
        self.network.tell(f"{name} is started")
        self.turns.add(process, self.turns.now + late)
        return process

    def _is_slow(self) -> bool:
        """Who takes another's place may take longer than anybody's patience."""
        return self.supervisor.epoch > self.supervisor._born and self.story.rng.random() < 0.1

    def _kill(self) -> None:
        if self.landlord.living:
            self.story.rng.choice(self.landlord.living).murder("wherever it is")

    def _freeze(self, seconds: float) -> None:
        if self.landlord.living:
            self.story.rng.choice(self.landlord.living).freeze(seconds, "wherever it is")

    def _lost_only_one(self) -> bool:
        """Nothing happened but one death, before anybody could be done, so that who lives can go on."""
        alone = self.landlord.killed == self.landlord.replaceable == 1
        return alone and not self.landlord.frozen and not any(self.network.refused.values())

    def _judge(self) -> str:
        """The digest of the parameters, if they are right; "" if there is no end that has any."""
        setting, used = self.setting, len(self.supervisor.causes)
        if used > setting.max_restarts:
            raise PromiseBroken(f"{used} restarts, where {setting.max_restarts} may be")
        if self._end == "RecoveryFailed" and used == setting.max_restarts:
            return ""
        if self._end == "ProcessFailed" and not setting.max_restarts:
            return ""
        if self._end != "complete":
            raise PromiseBroken(f"the job ends with {self._end or 'nothing'} after {used} restarts")
        if self._lost_only_one() and (self._lives, self.supervisor.parts) != (1, 1):
            raise PromiseBroken("all began anew, where one could be replaced")
        parameters = setting.undisturbed()
        for rank in range(setting.nranks):
            own = setting.own(rank)
            for _ in range(setting.steps):
                own = setting.own_after(own)
            found, found_own = self.finished[rank]
            if found.tobytes() != parameters.tobytes() or found_own.tobytes() != own.tobytes():
                raise PromiseBroken(f"rank {rank} does not end as in the undisturbed run")
        return hashlib.sha256(parameters.tobytes()).hexdigest()


@contextmanager
def variables_as_before() -> Iterator[None]:
    """In os.environ none of a launcher's; afterwards what there was."""
    before = {name: os.environ.pop(name, None) for name in (*VARIABLES, FAULT_HERE_VARIABLE)}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def simulate_ring(seed: int, log: Callable[[str], object] = lambda _: None) -> SimulatedRing:
    """What becomes of that seed, the same each time. Only one at a time, in the main thread or any other.

    Raises:
        PromiseBroken: a promise is.
    """
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    try:
        with tempfile.TemporaryDirectory(dir=memory) as folder, variables_as_before(), Turns() as turns:
            simulation = RingSimulation(seed, turns, Path(folder), log)
            with contextlib.redirect_stderr(Lines(simulation.network.tell)):
                return simulation.run()
    except PromiseBroken as exc:
        raise PromiseBroken(f"seed {seed}: {exc}") from exc
    except Exception as exc:
        raise PromiseBroken(f"seed {seed}: {type(exc).__name__}: {exc}") from exc
