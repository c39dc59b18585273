"""Row 9: commits that were torn, flipped or never written. A training goes on from the newest whole one, with the bits
of the undisturbed run; where none is whole, or the disk is full, that is said. How each byte is looked at:
tests/unit/common/commit/test_folder.py; kills while files are written: test_kills.py."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddle")

from common.commit.folder import MANIFEST, CommitFolder
from common.errors import CommitCorrupt, CommitFailed
from tests.faults.jobs import SCHEMES, Once
from tests.faults.kills import COMMIT_EVERY, STEPS, Killed, Run, frozen_child, left_by, undisturbed
from tests.support.commands import Started
from tests.support.disks import FILLER, fill, small_disk

MANY = 300  # steps, of which the first ones take less time than a commit
NEWEST = STEPS // COMMIT_EVERY * COMMIT_EVERY
FILES = {"ps": ("rank-0", "rank-1", "server-0", "manifest"), "collective": ("rank-0", "rank-1", "manifest")}
schemes = pytest.mark.parametrize("scheme", SCHEMES)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def train(run: Run, scheme: str, commits: Path, *flags: object, fault: str = "", **more: Any) -> Killed:
    where = ["--checkpoint-dir", commits, "--commit-every", COMMIT_EVERY]
    return run(scheme, fault, *where, *flags, commits=False, **more)


@pytest.fixture
def made(tmp_path: Path, run: Run, once: Once) -> Callable[[str], CommitFolder]:
    """A copy of what a training under this scheme has left."""

    def copied(scheme: str) -> CommitFolder:
        def make() -> str:
            done = train(run, scheme, tmp_path / "made")
            assert done.started.code == 0, done.err
            return str(tmp_path / "made")

        return CommitFolder(shutil.copytree(once(f"commits under {scheme}", make), tmp_path / "copy"))

    return copied


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink], ids=lambda each: each.__name__)
@pytest.mark.parametrize(("scheme", "what"), [(scheme, what) for scheme in SCHEMES for what in FILES[scheme]])
def test_a_training_goes_back_to_the_newest_whole_commit(
    scheme: str,
    what: str,
    damage: Callable[[Path], None],
    made: Callable[[str], CommitFolder],
    run: Run,
    once: Once,
) -> None:
    commits = made(scheme)
    file = commits.of_step(NEWEST) / MANIFEST if what == "manifest" else commits.part_file(NEWEST, what)
    damage(file)
    job = train(run, scheme, commits.path, "--resume")
    assert job.started.code == 0, job.err
    if what != "manifest" or damage is not Path.unlink:  # without it that is no commit
        assert f"the commit of step {NEWEST} is not whole: {file}: " in job.started.out
        assert f"; going back to that of step {NEWEST - COMMIT_EVERY}" in job.started.out
    assert job.digest == undisturbed(run, once)
    assert [commits.verify(step).step for step in commits.steps()][-1] == NEWEST
    assert left_by(job) == []


@schemes
def test_where_no_commit_is_whole_that_is_said(scheme: str, made: Callable[[str], CommitFolder], run: Run) -> None:
    commits = made(scheme)
    for step in commits.steps():
        flip(commits.part_file(step, "rank-0"))
    job = train(run, scheme, commits.path, "--resume")
    assert job.started.code == CommitCorrupt.exit_code
    assert f"CommitCorrupt: none of the {len(commits.steps())} commit(s) in {commits.path} is whole; " in job.err
    assert left_by(job) == []


@schemes
def test_a_full_disk_is_said_and_what_was_written_before_serves(
    scheme: str, tmp_path: Path, run: Run, once: Once
) -> None:
    """It is full from the moment on at which the first commit is whole."""
    stop = f"manifest-renamed:0:{COMMIT_EVERY}:stop"
    with small_disk(tmp_path / "disk", kib=4096) as disk:

        def fill_it(job: Started) -> None:
            frozen = frozen_child(job)
            fill(disk)
            frozen.send_signal(signal.SIGCONT)

        job = train(run, scheme, disk, "--steps", MANY, fault=stop, meanwhile=fill_it)
        assert job.started.code == CommitFailed.exit_code
        assert "CommitFailed: " in job.err
        assert re.search(r" the commit of step \d+: ", job.err)
        assert "No space left on device" in job.err
        assert left_by(job) == []
        (disk / FILLER).unlink()
        shutil.copytree(disk, tmp_path / "elsewhere")
    commits = CommitFolder(tmp_path / "elsewhere")
    assert COMMIT_EVERY <= commits.steps()[-1] < MANY
    again = train(run, scheme, commits.path, "--steps", MANY, "--resume")
    assert again.started.code == 0, again.err
    assert again.digest == once("many steps", lambda: run("collective", "", "--steps", MANY, commits=False).digest)
