"""Rows 1 and 2: kill -9 of any process at a moment that a seed chooses, once all have made steps: the others keep their
processes, at most one step is made again, and the bits are those of the undisturbed run."""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

pytest.importorskip("paddle")

from benchmarks.faults import killing
from benchmarks.faults.killing import Killing, Role
from common.credentials.credentials import variable_of
from tests.faults.jobs import SCHEMES, Once
from tests.support import warm as warm_programs

SEEDS = 3
ROUND = os.environ.get("GRADSYNC_FAULTS", "")  # others than those of another one
STEPS = 200
PLANES = {"ps": ("shm", "tcp", "grpc"), "collective": ("shm", "tcp")}


def undisturbed(nranks: int) -> str:
    with Killing("ring", "shm", nranks, STEPS) as job:
        return job.digest()


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers and all that they start, where they share this host, are forked: none of them imports Paddle anew."""
    monkeypatch.setattr(killing, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": warm_programs.Popen}))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("nranks", [2, 4])
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_process_is_killed_at_any_moment(scheme: str, seed: int, nranks: int, once: Once) -> None:
    chance = random.Random(f"{scheme} {seed} {nranks} {ROUND}")
    kill_one(once, scheme, chance.choice(PLANES[scheme]), nranks, chance)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("nranks", [2, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_process_of_two_hosts_is_killed_at_any_moment(
    scheme: str, nranks: int, once: Once, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable_of("insecure"), "1")  # as `python -m benchmarks` does, started without credentials
    kill_one(once, scheme, "tcp", nranks, random.Random(f"two hosts {scheme} {nranks} {ROUND}"), hosts=2)


def kill_one(once: Once, scheme: str, plane: str, nranks: int, chance: random.Random, hosts: int = 1) -> None:
    after, more = 20 * chance.randrange(1, 6), chance.uniform(0.0, 0.1)
    before: list[Role] = []

    def choose(there: Sequence[Role]) -> Role:
        before.extend(there)
        return chance.choice(there)

    with Killing("ps" if scheme == "ps" else "ring", plane, nranks, STEPS, hosts=hosts) as job:
        job.until(lambda: job.step >= after, f"step {after}")
        moment = time.monotonic() + more
        job.until(lambda: time.monotonic() > moment, "moment")
        who = job.kill(choose)
        survivors = {role: process.pid for role, process in job.alive()}
        digest = job.digest()
    (recovery,) = job.recoveries
    where = f"{who} of {nranks}, {scheme} ({plane}, {hosts} hosts)"
    print(f"{where}, {more:.3f} s after step {after}: {recovery.whole_s:.2f} s")
    assert re.search(r"recovered: all go on after step \d+, [01] steps? replayed", "\n".join(job.lines)), job.lines
    changed = {role for role, process in before if survivors[role] != process.pid}
    assert changed == {who}
    assert digest == once(f"{nranks} ranks", lambda: undisturbed(nranks))
