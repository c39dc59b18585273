"""What is trained in the simulation of a ring, what happens to it, and what each of its ranks does: as the built-in
training (common/trainer/training.py), of NumPy alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.faults.simulated import RATE, PromiseBroken, Training
from benchmarks.faults.simulated_job import SimulatedProcess
from benchmarks.faults.simulated_network import TIMEOUT_S, WAYS
from collective.algorithms.ring import RingAlgorithm
from collective.group import Group
from collective.synchronizer import RingSynchronizer
from common.commit.kept_parts import KEPT_VARIABLE, KeptParts
from common.commit.parts import Part
from common.errors import PeerError, PeerUnreachable
from common.sync.boundaries import Boundaries, join_first
from common.sync.synchronizer import Synchronizer
from common.system.next_epoch import is_mended
from common.system.process import restarts
from common.tensors.arena import FloatArray
from common.tensors.buckets import ALIGNMENT, plan_buckets

__all__ = ["Finished", "Own", "Rank", "Setting"]

WAIT_LIMIT_S = 10_000.0  # nobody may rely on it
RESTARTS = (0, 1, 2, 2, 3, 3, 4, 5)
LENGTHS = (0.5, 1.5, 3.0)  # of freezes, timeouts
PLACE = 64  # a power for each rank: digits of a float32 that are exact
Own = npt.NDArray[np.uint64]
Finished = dict[int, tuple[FloatArray, Own]]  # parameters, and what it has alone, by ranks


@dataclass(frozen=True)
class Setting(Training):
    """What is trained, and what happens to it."""

    max_restarts: int
    kills: list[int]  # moments
    kill_times: list[float]
    freezes: list[tuple[int, float]]  # at which moments, for how long
    freeze_times: list[tuple[float, float]]
    wrong: list[tuple[int, str]]  # messages

    @staticmethod
    def drawn(seed: int, rng: random.Random) -> Setting:
        starts = sorted({0, *(ALIGNMENT * rng.randrange(8) for _ in range(rng.randrange(2)))})
        length = starts[-1] + ALIGNMENT * rng.randint(1, 4)
        limit = 4 * ALIGNMENT * rng.randint(2, 6)
        buckets = list(plan_buckets(starts, length, first_bytes=limit, bucket_bytes=limit))
        nranks, steps = rng.choice((2, 2, 3, 3, 4)), rng.choice((2, 2, 3, 4))
        span = 30 * nranks * steps  # moments, about
        wrong = [(rng.randrange(span // 2), rng.choice((*WAYS, "old"))) for _ in range(rng.choice((0, 0, 1)))]
        kills = [rng.randint(1, span)] if rng.random() < 0.7 or any(way == "old" for _, way in wrong) else []
        while kills and rng.random() < 0.4:
            kills.append(kills[-1] + rng.randint(1, rng.choice((20, span))))
        last = kills[-1] if kills else rng.randrange(span)
        return Setting(
            nranks,
            buckets,
            length,
            steps,
            seed,
            rng.choice(RESTARTS),
            kills,
            [rng.uniform(0, steps) for _ in range(rng.choice((0, 0, 1)))],
            [(last + rng.randint(1, 40), TIMEOUT_S * rng.choice(LENGTHS)) for _ in range(rng.choice((0, 0, 0, 1)))],
            [(rng.uniform(0.2, steps), TIMEOUT_S * rng.choice(LENGTHS)) for _ in range(rng.choice((0, 0, 0, 0, 0, 1)))],
            wrong,
        )

    def gradients(self, rank: int, step: int, parameters: FloatArray) -> FloatArray:
        """The first of each bucket is a ledger: whose contributions its sum has, and how often."""
        found = super().gradients(rank, step, parameters)
        for bucket in self.buckets:
            found[bucket.start] = PLACE**rank
        return found

    @staticmethod
    def own(rank: int) -> Own:
        """What a rank has alone at first."""
        return np.array([rank], np.uint64)

    @staticmethod
    def own_after(own: Own) -> Own:
        """One step later: never again as before."""
        following: Own = own * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        return following


class InterruptedParts(KeptParts):
    """What a rank keeps; it may die between any two writes of it."""

    def __init__(self, process: SimulatedProcess) -> None:
        super().__init__(process.environment[KEPT_VARIABLE])
        self._process = process

    def _set(self, slot: int, step: int, *place: int) -> None:
        self._process.moment("keeps a step")
        super()._set(slot, step, *place)
        self._process.moment("has kept a part of a step")


class Rank:
    """What one process does.

    Args:
        place: where its first group meets.
        finished: what it has in the end is put there.
    """

    def __init__(self, process: SimulatedProcess, setting: Setting, place: str, finished: Finished) -> None:
        self.rank, self.process, self.setting, self.finished = process.rank, process, setting, finished
        self._landlord, self._place = process.landlord, place
        self._network, self._turns = self._landlord.network, self._landlord.turns
        self._rng = self._network.story.rng

    def run(self) -> None:
        with join_first(
            self._join, self.rank, WAIT_LIMIT_S, clock=self._turns.clock, pause=self._pause
        ) as synchronizer:
            has_kept = bool(self.process.environment[KEPT_VARIABLE])
            with Boundaries(
                synchronizer,
                WAIT_LIMIT_S,
                open_kept=lambda: InterruptedParts(self.process) if has_kept else None,
                clock=self._turns.clock,
                pause=self._pause,
            ) as boundaries:
                self._train(synchronizer, boundaries)

    def _join(self, place: str) -> RingSynchronizer:
        return RingSynchronizer(self._connect(place or self._place), overlap=False, connect=self._connect)

    def _connect(self, place: str) -> Group:
        transport = self._network.join(self.process, self.rank, self.setting.nranks, place)
        self._group = Group(RingAlgorithm(transport), backend="simulated", epoch=restarts())
        return self._group

    def _pause(self, _: float) -> None:
        self.process.moment("waits for the word")
        self._turns.sleep(self.process, self._rng.uniform(0.05, 0.5))

    def _train(self, synchronizer: Synchronizer, boundaries: Boundaries) -> None:
        while True:
            try:
                self._train_in_one_group(synchronizer, boundaries)
                return
            except (PeerError, PeerUnreachable) as exc:
                self._tell(f"hears {type(exc).__name__}: {exc}")
                self.process.moment("leaves its group")
                boundaries.leave(exc)
            self.process.moment("has left its group")
            boundaries.rejoin()

    def _train_in_one_group(self, synchronizer: Synchronizer, boundaries: Boundaries) -> None:
        boundary = boundaries.agree()
        step = boundary.step if boundary else 0
        first = synchronizer.all_gather(np.array([step], np.int64))
        if (first != step).any():
            raise PromiseBroken(f"ranks begin with other steps: {first[:, 0].tolist()}")
        if boundary is None:
            parameters, own = self.setting.initial(), self.setting.own(self.rank)
            self._keep(boundaries, 0, own, parameters)
            if is_mended():
                boundaries.gone_back(0)
        else:
            parameters, own = boundary.common.arrays["parameters"], boundary.own.arrays["own"]
            self._tell(f"is back at step {step}")
            self._check_made_again(step)
            boundaries.gone_back(step)
        for number in range(step, self.setting.steps):
            parameters = self._after_step(number, parameters)
            own = self.setting.own_after(own)
            self._keep(boundaries, number + 1, own, parameters)
        synchronizer.all_gather(np.array([0], np.int64))  # the evaluation
        self.finished[self.rank] = (parameters, own)
        self._tell("has made all steps")
        self.process.moment("ends")

    def _after_step(self, step: int, parameters: FloatArray) -> FloatArray:
        setting, rng = self.setting, self._rng
        self._turns.sleep(self.process, rng.expovariate(20.0) + (0.7 * TIMEOUT_S if rng.random() < 0.01 else 0.0))
        gradients = setting.gradients(self.rank, step, parameters)
        for number, bucket in enumerate(setting.buckets):
            self._group.all_reduce(gradients[bucket.start : bucket.stop], "mean", step=step, bucket=number)
        self._check_contributions(step, gradients)
        updated: FloatArray = parameters - RATE * gradients
        return updated

    def _check_contributions(self, step: int, means: FloatArray) -> None:
        """Of each rank there is one."""
        for bucket in self.setting.buckets:
            ledger = round(float(means[bucket.start]) * self.setting.nranks)
            if ledger != sum(PLACE**rank for rank in range(self.setting.nranks)):
                raise PromiseBroken(f"step {step} is not one contribution of each rank, but {ledger}")

    def _keep(self, boundaries: Boundaries, step: int, own: Own, parameters: FloatArray) -> None:
        boundaries.keep(step, Part({"own": own}), Part({"parameters": parameters}))
        if boundaries.are_kept:
            self._landlord.kept[self.rank] = step
        self._tell(f"has made {step} steps")

    def _check_made_again(self, step: int) -> None:
        kept = self._landlord.kept
        if kept.get(self.rank, 0) > step + 1:
            raise PromiseBroken(f"rank {self.rank} goes back from step {kept[self.rank]} to {step}")
        kept[self.rank] = step

    def _tell(self, what: str) -> None:
        self._network.tell(f"rank {self.rank} {what}")
