"""Killed at any moment after a commit, a training that goes on ends with the bits of the one that nobody disturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from common.commit.folder import CommitFolder
from tests.support.commands import JOB, Started, digest_in, end_all, until

RUN = {
    "ps": ("ps.run", "--nranks", "2"),
    "collective": ("collective.run", "--nranks", "2"),
}
MORE = 12  # steps
SERVER, RANK, LAUNCHER = 0, -1, None  # which of a launcher's children is killed


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Started]]:
    found: list[Started] = []
    yield found
    end_all(found)


def begin(started: list[Started], folder: Path, scheme: str, *flags: object) -> Started:
    place = folder / str(len(started))
    place.mkdir()
    started.append(Started(place, *RUN[scheme], *JOB, "--json", place / "run.json", *flags))
    return started[-1]


def kill(job: Started, which: int | None) -> None:
    """A process that the launcher has started, servers first, or the launcher."""
    pid = job.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    children = [child for child in children if "launch.guard" not in Path(f"/proc/{child}/cmdline").read_text()]
    os.kill(pid if which is None else int(children[which]), signal.SIGKILL)
    job.process.wait(40)


@pytest.mark.parametrize(
    ("scheme", "victim", "again"),
    [
        ("ps", SERVER, ("collective",)),
        pytest.param("ps", LAUNCHER, ("ps", "--servers", 3), marks=pytest.mark.long),
        pytest.param("ps", RANK, ("ps", "--data-plane", "tcp"), marks=pytest.mark.long),
        pytest.param("collective", RANK, ("ps", "--servers", 2), marks=pytest.mark.long),
        pytest.param("collective", LAUNCHER, ("collective", "--shard-optimizer"), marks=pytest.mark.long),
    ],
)
def test_it_goes_on_with_the_same_bits(
    started: list[Started], tmp_path: Path, scheme: str, victim: int | None, again: tuple[object, ...]
) -> None:
    commits = ["--checkpoint-dir", tmp_path / "commits", "--commit-every", 5]
    folder = CommitFolder(tmp_path / "commits")
    killed = begin(started, tmp_path, scheme, *commits, "--steps", 100_000)
    until(lambda: killed.process.poll() is not None or folder.steps(), "a commit")
    assert killed.process.poll() is None, killed.err
    kill(killed, victim)
    steps = folder.steps()[-1] + MORE
    last = begin(started, tmp_path, str(again[0]), *again[1:], *commits, "--steps", steps, "--resume")
    assert last.code == 0, last.err
    assert last.err == f"gradsync: goes on from the commit of step {steps - MORE} in {folder}\n"
    whole = begin(started, tmp_path, "collective", "--steps", steps)
    whole.ended_well()
    digests = [digest_in(tmp_path / str(number) / "run.json") for number in (1, 2)]
    assert digests[0] == digests[1]
