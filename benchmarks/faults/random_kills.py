"""Kills without a plan: at any moment, of any process; and for a long time, one after the other.

random kills   each job loses one process at a random moment, from its start to its end, of two hosts perhaps a
               launcher; its digest is that of the job that loses none (row 1)
soak           one job of many steps loses a process every so many; the same digest, and nothing grows (row 19)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from benchmarks.faults.killing import Killing
from benchmarks.records.faults import Recovery, Usage
from common.errors import GradSyncError

__all__ = ["BACKENDS", "NRANKS", "Result", "faults_of", "grows", "random_kills", "soak"]

ON_TWO = "tcp on 2 hosts"  # of a launcher each, on this machine
BACKENDS = {"ring": ("shm", "tcp", ON_TWO), "ps": ("shm", "tcp", "grpc", ON_TWO)}
NRANKS = (2, 4)
STEPS = 1_000
RECOVERY_S = 2.0
GROWTH, ROOM_MB = 1.1, 8.0  # of memory, from the first third of a soak to the last


@dataclass
class Result:
    """Of some kills.

    Args:
        kept: after how many of them the digest was that of the undisturbed job; and where the others went on, they kept
            their processes, made at most one step again, and waited at most RECOVERY_S beside the start and the imports
            of the new one.
        usage: of each process just before each kill.
        why_not: what was wrong first.
    """

    kills: int = 0
    kept: int = 0
    recoveries: list[Recovery] = field(default_factory=list)
    usage: list[list[Usage]] = field(default_factory=list)
    why_not: str = ""


def random_kills(
    scheme: str, nranks: int, count: int, seed: int, tell: Callable[[str], None] = lambda _: None
) -> Result:
    """So many, each in a job of its own. Over all backends in turn; which process and when is chosen by the seed.

    Raises:
        GradSyncError: a job hangs, or fails before it has lost anybody.
    """
    chance, result = random.Random(f"{scheme} {nranks} {seed}"), Result()
    expected, length = undisturbed(scheme, BACKENDS[scheme][0], nranks, STEPS)
    while result.kills < count:
        backend = BACKENDS[scheme][result.kills % len(BACKENDS[scheme])]
        with Killing(scheme, backend.split()[0], nranks, STEPS, hosts=1 + (backend == ON_TWO)) as job:
            moment = job.begun + chance.uniform(0.0, length)
            job.until(lambda: time.monotonic() > moment, "moment")  # noqa: B023 - it is called at once
            needed = job.in_the_midst
            who = job.kill(chance.choice, launchers=backend == ON_TWO)
            digest = job.digest()
        if not who:  # it had ended by then
            if digest != expected:
                raise GradSyncError(f"a job of {scheme} ({backend}) that lost nobody ended otherwise: {digest}")
            continue
        result.kills += 1
        result.recoveries += job.recoveries
        faults = [] if digest == expected else [f"{digest}, not {expected}"]
        needed &= not who.startswith("launcher")
        faults += [fault for recovery in job.recoveries for fault in faults_of(recovery, needed=needed)]
        result.kept += not faults
        what = f"{who} of {nranks}, {scheme} ({backend}), {moment - job.begun:.2f} s after the job's start"
        if faults and not result.why_not:
            result.why_not = f"{what}: {'; '.join(faults)}"
        took = words_of(job.recoveries[0]) if job.recoveries else "-"
        tell(f"kill {result.kills}: {what}: {took}, {'; '.join(faults) or 'the same bits'}")
    return result


def faults_of(recovery: Recovery, *, needed: bool = False) -> Iterator[str]:
    """What is not as promised, where the others went on; as they have to when the one that was killed was `needed`: all
    had made a step, none the last one, and no host was lost."""
    if recovery.replayed is None:
        if needed:
            yield "all were started again"
        return
    if not recovery.stayed:
        yield "another one lost its process"
    if recovery.replayed > 1:
        yield f"{recovery.replayed} steps were made again"
    if (waited := recovery.whole_s - recovery.starting_s) > RECOVERY_S:
        yield f"the others waited {waited:.1f} s beside the new process's start and imports"


def words_of(recovery: Recovery) -> str:
    how = "all anew" if recovery.replayed is None else f"the others went on, {recovery.replayed} replayed"
    return f"{recovery.whole_s:.2f} s, {how}"


def soak(
    scheme: str,
    steps: int,
    kill_every: int,
    seed: int,
    tell: Callable[[str], None] = lambda _: None,
    *,
    mtbf: float = 0.0,
) -> Result:
    """One job of two ranks, whose processes are killed one after the other.

    Args:
        kill_every: steps between two kills.
        mtbf: the mean of the seconds between two kills, which then come at any moment; 0: by steps.
    """
    chance, result = random.Random(f"soak {scheme} {seed}"), Result()
    backend = BACKENDS[scheme][0]
    expected, _ = undisturbed(scheme, backend, 2, steps)
    most = steps if mtbf else max(1, len(range(kill_every, steps, kill_every)))
    with Killing(scheme, backend, 2, steps, restarts=most) as job:
        for ready in at_random(chance, mtbf) if mtbf else after_steps(job, kill_every, steps):
            job.until(ready, "moment to kill")
            if job.over:
                break
            step, usage = job.step, job.usage()
            if who := job.kill(chance.choice):
                result.kills += 1
                result.usage.append(usage)
                tell(f"{scheme}: {who} killed after step {step:,}; {usage[0]}")
        digest = job.digest()
    result.recoveries = job.recoveries
    faults = [*grows(result.usage)]
    if digest != expected:
        faults.insert(0, f"{digest}, not {expected}")
    result.kept, result.why_not = int(not faults), "; ".join(faults)
    return result


def after_steps(job: Killing, every: int, steps: int) -> Iterator[Callable[[], bool]]:
    """When it is time, so many steps after the last kill."""
    for step in range(every, steps, every):
        yield lambda: job.step >= step  # noqa: B023 - it is called before the next


def at_random(chance: random.Random, mean: float) -> Iterator[Callable[[], bool]]:
    """When it is time, as failures come that have no memory."""
    while True:
        moment = time.monotonic() + chance.expovariate(1 / mean)
        yield lambda: time.monotonic() >= moment  # noqa: B023 - it is called before the next


def undisturbed(scheme: str, backend: str, nranks: int, steps: int) -> tuple[str, float]:
    """The digest of a job that loses nobody, and how long it takes."""
    with Killing(scheme, backend, nranks, steps) as job:
        digest = job.digest()
        return digest, time.monotonic() - job.begun


def grows(samples: Sequence[Sequence[Usage]]) -> Iterator[str]:
    """What processes have more of before the last third of the kills than before the first.

    The median before counts, and the least in the end: a file that is being written at the moment is no growth, nor is
    a thread that was not needed once, and what is never given back raises the least, too.
    """
    third = len(samples) // 3
    for who in sorted({each.who for sample in samples for each in sample}):
        first, last = (
            [each for sample in part for each in sample if each.who == who]
            for part in (samples[:third], samples[-third:] if third else ())
        )
        if not (first and last):
            continue
        for name, room, factor in (("memory_mb", ROOM_MB, GROWTH), ("descriptors", 0.0, 1.0), ("threads", 0.0, 1.0)):
            before, now = median_low(getattr(each, name) for each in first), min(getattr(each, name) for each in last)
            if now > before * factor + room:
                yield f"{name} of {who} grew from {before:g} to {now:g}"
