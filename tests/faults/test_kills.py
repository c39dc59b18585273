"""Rows 1, 2 and 9: kill -9 of any process at any point of any step, commits being written included. Under
`--max-restarts` the bits are those of the undisturbed run, and nothing is left. Once all have made a step, until the
last one, the others keep their processes, and at most one step is made again."""

from __future__ import annotations

import re
from itertools import product

import pytest

pytest.importorskip("paddle")

from common.system.fault_points import COMMIT_FILES, STAGES
from tests.faults.jobs import Once
from tests.faults.kills import AT, COMMIT_EVERY, PLANES, STEPS, Run, left_by, states_of, undisturbed, undisturbed_states

RING = ("backward", "before-reduce")
CALLS = ("sending", "sent", "receiving")  # whose numbers are of calls, of which there are some before the first step
RING_TCP = (*RING, *CALLS)
TRAINER = ("backward", "before-push", "pushed", "before-commit", "committed", "received")
SERVER = ("got-push", "stored", "got-commit", "before-reply", "replied")
BY_PLANE = ("pushed", "committed", "got-push", "stored", "before-reply")
ONCE = ("joining", "joined", "leaving")
FIRST_COMMIT, LAST_COMMIT = COMMIT_EVERY, STEPS // COMMIT_EVERY * COMMIT_EVERY
PARTS, MANIFESTS = ([f"{file}-{stage}" for stage in STAGES] for file in COMMIT_FILES)
# After these at this step the others may have all they need, and end:
LATE = {**dict.fromkeys((*PARTS, *MANIFESTS), LAST_COMMIT), **dict.fromkeys(("committed", "received"), STEPS - 1)}

Case = tuple[str, str, str]  # scheme, plane, GRADSYNC_FAULT


def faults(who: str, points: tuple[str, ...], *, files: bool) -> list[str]:
    """At each of these points, and, if that is said, in the writing of each file of a commit."""
    found = [f"{point}:{who}:{step}" for point, step in product(points, AT)]
    written = [*PARTS, *(MANIFESTS if who == "0" else ())] if files else []
    return found + [f"{point}:{who}:{step}" for point, step in product(written, (FIRST_COMMIT, LAST_COMMIT))]


def points_of(who: str, *, every: bool) -> tuple[str, ...]:
    """Of a trainer's or a server's; where not every one, those at which it makes a difference how data travel."""
    points = SERVER if who.startswith("s") else TRAINER
    return points if every else tuple(each for each in points if each in BY_PLANE)


def cases(scheme: str, who: str) -> list[Case]:
    """Where a process is killed."""
    once = (*ONCE, "introduced") if scheme == "collective" else ONCE
    of_once = [f"{point}:{who}:0" for point in once if not who.startswith("s")]
    found = []
    for plane in PLANES[scheme]:
        first = plane == PLANES[scheme][0]
        points = (RING if first else RING_TCP) if scheme == "collective" else points_of(who, every=first)
        more = faults(who, points, files=first) + (of_once if first else [])
        found += [(scheme, plane, fault) for fault in more]
    return found


QUICK = ("ps", "shm", "manifest-synced:0:6")  # that `make test` runs


def given(found: list[Case]) -> pytest.MarkDecorator:
    marked = [pytest.param(*each, marks=[pytest.mark.quick] if each == QUICK else []) for each in found]
    return pytest.mark.parametrize(("scheme", "plane", "fault"), marked)


A_RANK = [*cases("collective", "1"), *cases("ps", "1"), *cases("ps", "0")]
WHERE_ALL_MEET = [*cases("collective", "0"), *cases("ps", "s0")]


def saved(run: Run, once: Once, scheme: str, plane: str, fault: str) -> None:
    job = run(scheme, fault, "--max-restarts", 1, plane=plane)
    assert job.started.code == 0, job.err
    assert len(job.struck()) == 1
    assert "was killed by SIGKILL" in job.err
    assert "recovered" in job.err
    point, _, step = fault.split(":")
    if point not in (*ONCE, *CALLS) and int(step) and LATE.get(point) != int(step):
        assert re.search(r"recovered: all go on after step \d+, [01] steps? replayed, ", job.err), job.err
        assert job.processes == len(job.logs) + 2  # the guard, and the one in the place of another
    assert job.digest == undisturbed(run, once)
    back_to = re.search(r"all go on after step (\d+)", job.err)
    if back_to is None or int(back_to[1]) <= LAST_COMMIT:  # else it may have been under way, beside the training
        assert max(states_of(job)) == LAST_COMMIT
    assert states_of(job).items() <= undisturbed_states(scheme, run, once).items()
    assert left_by(job) == []


@given(A_RANK)
def test_a_rank_is_killed_and_the_bits_are_the_same(scheme: str, plane: str, fault: str, run: Run, once: Once) -> None:
    saved(run, once, scheme, plane, fault)


@given(WHERE_ALL_MEET)
def test_the_server_or_rank_0_is_killed_and_the_bits_are_the_same(
    scheme: str, plane: str, fault: str, run: Run, once: Once
) -> None:
    saved(run, once, scheme, plane, fault)
