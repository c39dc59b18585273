"""Killed at any moment after a commit, a training that goes on ends with the bits of the one that nobody disturbed."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from common.commit.folder import CommitFolder
from tests.support.commands import JOB, Started, digest_in, end_all, until
from tests.support.groups import ROOT

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


@pytest.mark.long
def test_another_number_of_ranks_goes_on_if_asked(started: list[Started], tmp_path: Path) -> None:
    """Both schemes with the same bits; and so does who is resumed once more with the new number."""
    commits = ["--commit-every", 5, "--dataset", "digits", "--checkpoint-dir"]
    resume = ["--nranks", 3, "--resume", "--epochs", 1]
    folders = [tmp_path / "first", tmp_path / "ring", tmp_path / "ps"]
    begin(started, tmp_path, "ps", *commits, folders[0], "--steps", 6).ended_well()
    for copy in folders[1:]:
        shutil.copytree(folders[0], copy)
    begin(started, tmp_path, "ps", *commits, folders[0], *resume).refused("is of 2 rank(s), this job has 3")
    for scheme, folder in (("collective", folders[1]), ("ps", folders[2])):
        begin(started, tmp_path, scheme, *commits, folder, *resume, "--elastic").ended_well(telling=" goes on from ")
        told = f"goes on from the commit of step 5 in {folder}, of 2 rank(s), with 3: from here on its bits are another"
        assert told in started[-1].err
    for step in CommitFolder(folders[1]).steps()[1:]:
        shutil.rmtree(folders[1] / f"step-{step:08}")
    begin(started, tmp_path, "ps", *commits, folders[1], *resume).ended_well(telling=" goes on from ")
    digests = {digest_in(tmp_path / str(number) / "run.json") for number in (2, 3, 4)}
    assert len(digests) == 1


def results_of(folder: Path) -> list[str]:
    """What each rank says of the end."""
    logs = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("workerlog.*")))
    return sorted(re.findall(r"^RESULT (.*)$", logs, re.MULTILINE))


@pytest.mark.parametrize(
    ("scheme", "workers"),
    [
        ("ps", 2),
        pytest.param("ps", 0, marks=pytest.mark.long),
        pytest.param("collective", 0, marks=pytest.mark.long),
        pytest.param("collective", 2, marks=pytest.mark.long),
    ],
)
def test_a_program_of_ones_own_goes_on_too(
    started: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, workers: int
) -> None:
    monkeypatch.setenv("RESUMED_SCHEME", scheme)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")

    def run(name: str, *arguments: object) -> Started:
        """Two epochs of six batches, a commit every three."""
        place = tmp_path / str(len(started))
        place.mkdir()
        command = [*RUN[scheme], "--log-dir", place, ROOT / "tests" / "programs" / "resumed.py"]
        started.append(Started(place, *command, tmp_path / name, workers, 2, *arguments))
        started[-1].process.wait(40)
        return started[-1]

    assert run("killed", 7).code == 128 + signal.SIGKILL
    assert CommitFolder(tmp_path / "killed").steps() == [3, 6]
    again, whole = run("killed"), run("whole")
    assert (again.code, whole.code) == (0, 0), again.err + whole.err
    assert f"goes on from the commit of step 6 in {tmp_path / 'killed'}" in (tmp_path / "1/workerlog.0").read_text()
    assert results_of(tmp_path / "1") == results_of(tmp_path / "2")
    assert len(results_of(tmp_path / "2")) == 2
