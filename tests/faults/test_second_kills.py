"""Row 3: a second kill while the first one is being recovered from, by seeds."""

from __future__ import annotations

import os
import random

import pytest

pytest.importorskip("paddle")

from tests.faults.jobs import SCHEMES, Once
from tests.faults.kills import STEPS, Run, left_by, undisturbed
from tests.faults.test_kills import A_RANK, LATE, ONCE, WHERE_ALL_MEET

SEEDS = 20
ROUND = int(os.environ.get("GRADSYNC_FAULTS", "0") or 0)  # another one has other pairs
SECOND = {"collective": ("joined", "backward", "before-reduce"), "ps": ("joined", "backward", "before-push", "pushed")}
OF_A_SERVER = ("got-push", "stored", "before-reply")


def pair(scheme: str, seed: int) -> tuple[str, str]:
    """(plane, two faults): the second one strikes in the first step after the first."""
    chance = random.Random(ROUND * SEEDS + seed)
    plane, first = chance.choice([each[1:] for each in (*A_RANK, *WHERE_ALL_MEET) if each[0] == scheme])
    who = chance.choice(("0", "1", "s0") if scheme == "ps" else ("0", "1"))
    point = chance.choice(OF_A_SERVER if who == "s0" else SECOND[scheme])
    return plane, f"{first},{point}:{who}:0"


def is_late(faults: str) -> bool:
    """Whether the first one may come when nobody is to join any more, or to be killed."""
    point, _, step = faults.partition(",")[0].split(":")
    return point in ONCE or LATE.get(point) == int(step)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_second_kill_during_recovery(scheme: str, seed: int, run: Run, once: Once) -> None:
    plane, faults = pair(scheme, seed)
    job = run(scheme, faults, "--max-restarts", 2, plane=plane)
    assert job.started.code == 0, f"{faults}: {job.err}"
    # a manifest is written beside the training, which may be over by then
    nothing_left = f"all go on after step {STEPS}, " in job.err
    assert len(job.struck()) == 2 or is_late(faults) or nothing_left, f"{faults}: {job.err}"
    assert job.err.count("recovered") in (1, 2)
    assert job.digest == undisturbed(run, once)
    assert left_by(job) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_second_kill_that_is_one_too_many(scheme: str, run: Run) -> None:
    job = run(scheme, "backward:1:3,joined:1:0", "--max-restarts", 1)
    assert job.started.code == 6
    assert "RecoveryFailed: 1 restart did not help (--max-restarts 1); last, rank 1 was killed by SIGKILL" in job.err
    assert len(job.struck()) == 2
    # a commit may have been under way; whoever goes on from there removes it
    assert [each for each in left_by(job) if "commit" not in each] == []
