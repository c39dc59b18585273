"""The writer: a step waits only for the copy, errors come up, and a commit ends when all parts are there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from common.commit.folder import CommitFolder
from common.commit.manifest import Manifest, PartEntry
from common.commit.writer import Writer
from common.errors import CommitFailed
from tests.support.commits import folder_of, part_of

NAMES = ("rank-0", "rank-1")


@pytest.fixture
def folder(tmp_path: Path) -> CommitFolder:
    return folder_of(tmp_path)


@pytest.fixture
def writer(folder: CommitFolder) -> Iterator[Writer]:
    writer = Writer(folder, "rank-0")
    yield writer
    writer.close()


def commit(writer: Writer, step: int, timeout: float = 20.0) -> None:
    def describe(parts: dict[str, PartEntry]) -> Manifest:
        return Manifest(scheme="ring", nranks=2, step=step, epoch=0, parts=parts, parameters_sha256="")

    writer.write(step, part_of(step, "rank-0"))
    writer.complete(step, NAMES, describe, keep=1, timeout=timeout)


def test_a_commit_ends_when_all_parts_are_there(
    folder: CommitFolder, writer: Writer, wait_until: Callable[[Callable[[], object]], None]
) -> None:
    commit(writer, 20)
    wait_until(lambda: folder.entry(20, "rank-0"))
    writer.check()
    assert folder.steps() == []
    folder.write_part(20, "rank-1", part_of(20, "rank-1"))
    writer.finish()
    assert set(folder.verify(20).parts) == set(NAMES)
    folder.write_part(40, "rank-1", part_of(40, "rank-1"))
    commit(writer, 40)
    writer.finish()
    assert folder.begun() == [40], "one is to stay"


def test_a_step_does_not_wait_for_the_disk(folder: CommitFolder, writer: Writer) -> None:
    slow = threading.Event()
    with patch.object(folder, "write_part", lambda *_: slow.wait()):
        writer.write(20, part_of(20, "rank-0"))
        writer.check()  # returns, though nothing is written yet
        slow.set()
        writer.finish()


def test_what_could_not_be_written_comes_up_later(folder: CommitFolder) -> None:
    told: list[str] = []
    writer = Writer(folder, "rank-0", on_error=lambda exc: told.append(str(exc)))
    folder.of_step(20).write_text("in the way")
    writer.write(20, part_of(20, "rank-0"))
    with pytest.raises(CommitFailed, match=r"rank-0 cannot write its part of the commit of step 20: .*step-00000020"):
        writer.finish()
    assert len(told) == 1
    writer.write(40, part_of(40, "rank-0"))
    writer.finish()
    writer.close()


def test_a_part_that_does_not_come_is_named(folder: CommitFolder, writer: Writer) -> None:
    commit(writer, 20, timeout=0.05)
    with pytest.raises(CommitFailed, match=r"step 20 .* has no part of rank-1 after 0\.05 s; all hosts must share"):
        writer.finish()
    assert folder.steps() == []


def test_a_part_that_does_not_come_is_told_a_step_later(
    folder: CommitFolder, writer: Writer, wait_until: Callable[..., None]
) -> None:
    """Its writer may be dead, which a step between the two looks notices."""
    for step in (20, 40):  # two have failed by then, yet each is told once
        commit(writer, step, timeout=0.05)
    wait_until(lambda: all(ending.done() for ending in writer._ending))
    for step in (20, 40):
        writer.check()
        with pytest.raises(CommitFailed, match=f"step {step} .* has no part of rank-1"):
            writer.check()


def test_who_leaves_waits_for_nobody(folder: CommitFolder, writer: Writer) -> None:
    commit(writer, 20, timeout=1000)
    writer.close()
    assert folder.steps() == []


def test_who_leaves_ends_what_all_have_written(folder: CommitFolder, writer: Writer) -> None:
    folder.write_part(40, "rank-1", part_of(40, "rank-1"))
    commit(writer, 20, timeout=1000)  # which waits for rank 1, and the next one for this
    commit(writer, 40)
    writer.close()
    assert folder.steps() == [40]


def test_who_is_waited_for_does_not_hold_up_the_next_step(folder: CommitFolder, writer: Writer) -> None:
    """It may be dead, which only the training notices."""
    commit(writer, 20, timeout=1000)
    commit(writer, 40, timeout=1000)
    writer.write(60, part_of(60, "rank-0"))
    writer.check()
    assert folder.steps() == []
