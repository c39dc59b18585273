"""A folder of commits: whatever tears, flips or kills, what is loaded is whole, and the newest that is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from common.commit.folder import MANIFEST, CommitFolder
from common.errors import CommitCorrupt, CommitFailed, UsageError
from common.system import fault_points
from common.system.atomic_file import UNFINISHED
from common.system.fault_points import COMMIT_FILES, STAGES
from tests.support.commits import NAMES, commit, folder_of, part_of
from tests.support.disks import fill, small_disk

CALLS = ("open", "fsync", "replace", "unlink")  # of a file system, after any of which a writer may be killed


class Killed(BaseException):
    """Nothing may be done about it."""


def files_of(folder: CommitFolder, step: int) -> list[Path]:
    return [folder.part_file(step, name) for name in NAMES] + [folder.of_step(step) / MANIFEST]


def newest_of(folder: CommitFolder) -> tuple[int, str]:
    """Its step, and what was said."""
    said: list[str] = []
    found = folder.newest(said.append)
    return (found.step if found else 0), " ".join(said)


def test_parts_come_back_as_they_were_written(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 20)
    manifest = folder.verify(20)
    for name in NAMES:
        found, expected = folder.part(manifest, name), part_of(20, name)
        assert found.state == expected.state
        assert found.arrays.keys() == expected.arrays.keys()
        for key, array in expected.arrays.items():
            assert (found.arrays[key] == array).all()
            assert found.arrays[key].dtype == array.dtype
    assert (manifest.nranks, manifest.servers, manifest.step) == (2, 1, 20)


def test_writing_passes_all_fault_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    monkeypatch.setattr(fault_points, "reach", lambda point, step: passed.append(f"{point}:{step}"))
    folder_of(tmp_path, 20)
    of_a_part, of_the_manifest = ([f"{file}-{stage}:20" for stage in STAGES] for file in COMMIT_FILES)
    assert passed == [*of_a_part * len(NAMES), *of_the_manifest]


def test_a_folder_without_commits_has_none(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "new")
    folder.write_part(20, "rank-0", part_of(20, "rank-0"))  # never ended
    assert folder.newest() is None
    assert folder.steps() == []


def test_torn_at_any_512_bytes_the_commit_before_is_found(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 20, 40)
    for file in files_of(folder, 40):
        content = file.read_bytes()
        for length in range(0, len(content), 512):
            file.write_bytes(content[:length])
            step, said = newest_of(folder)
            assert step == 20
            assert f"the commit of step 40 is not whole: {file}: " in said
            assert said.endswith("going back to that of step 20")
            if file.name != MANIFEST:
                assert f"truncated at {length:,} of {len(content):,} bytes" in said
        file.write_bytes(content)
    assert newest_of(folder) == (40, "")


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 20, 40)
    random = np.random.default_rng(1)
    for file in files_of(folder, 40)[:-1]:
        for _ in flips_of(file, random.integers(0, file.stat().st_size, 40), random):
            step, said = newest_of(folder)
            assert step == 20
            assert f"{file}: its checksum is wrong: SHA-256" in said
            with pytest.raises(CommitCorrupt, match="checksum"):
                folder.part(folder.manifest(40), file.name.partition(".")[0])
    manifest = folder.of_step(40) / MANIFEST
    for _ in flips_of(manifest, np.arange(manifest.stat().st_size), random):
        step, said = newest_of(folder)
        assert step == 20
        assert f"the commit of step 40 is not whole: {manifest}: " in said
    assert newest_of(folder) == (40, "")


def flips_of(file: Path, places: npt.NDArray[np.int64], random: np.random.Generator) -> Iterator[None]:
    """A bit of the byte at each of these places is another one, in turn; then the file is as it was."""
    content = file.read_bytes()
    for at in places:
        flipped = bytearray(content)
        flipped[at] ^= 1 << int(random.integers(8))
        file.write_bytes(flipped)
        yield
    file.write_bytes(content)


def test_a_part_that_is_gone_or_longer_is_found(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 20, 40)
    file = folder.part_file(40, "rank-1")
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"\0")
    assert f"{file}: {size + 1:,} bytes, {size:,} were written" in newest_of(folder)[1]
    file.unlink()
    assert newest_of(folder) == (
        20,
        f"the commit of step 40 is not whole: {file}: No such file or directory; going back to that of step 20",
    )


def test_where_none_is_whole_that_is_said_with_the_newest_ones_fault(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 20, 40)
    for step in (20, 40):
        os.truncate(folder.part_file(step, "rank-0"), 100)
    with pytest.raises(CommitCorrupt) as caught:
        folder.newest()
    assert str(caught.value).startswith(
        f"none of the 2 commit(s) in {tmp_path} is whole; the commit of step 40 is not "
    )
    assert f"{folder.part_file(40, 'rank-0')}: truncated at 100 of " in str(caught.value)
    assert CommitCorrupt.exit_code == 2


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 20)
    file = folder.of_step(20) / MANIFEST
    file.write_text(file.read_text().replace('"version": 2', '"version": 1'))
    with pytest.raises(CommitCorrupt, match="it has version 1, this program reads version 2"):
        folder.manifest(20)
    file.write_text('{"version": 2, "step": "twenty"}')
    with pytest.raises(CommitCorrupt, match=f"{file}: not a manifest"):
        folder.manifest(20)
    shutil.copytree(folder_of(tmp_path / "other", 40).of_step(40), folder.of_step(60))
    with pytest.raises(CommitCorrupt, match="it is of step 40"):
        folder.manifest(60)


def killing(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], int]:
    """Be killed right after so many calls of the file system; returns how many there were."""
    count = 0
    for name in CALLS:
        real: Any = getattr(os, name)

        def counted(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            nonlocal count
            if count >= number:  # who is dead does nothing any more, in `finally` neither
                raise Killed
            result = real(*args, **kwargs)
            count += 1
            if count == number:
                raise Killed
            return result

        monkeypatch.setattr(os, name, counted)
    return lambda: count


def test_killed_after_any_call_the_old_commit_or_the_new_one_is_whole(tmp_path: Path) -> None:
    done, number, ended = [], 0, False
    while not ended:
        number += 1
        folder = folder_of(tmp_path / str(number), 20)
        with pytest.MonkeyPatch.context() as patched:
            killing(patched, number)
            try:
                commit(folder, 40)
                folder.prune(1)
                ended = True
            except Killed:
                pass
        step, said = newest_of(folder)
        assert said == ""
        done.append(step)
    assert number > 20
    assert done == sorted(done), "once it is there, it stays"
    assert done[0] == 20
    assert done[-1] == 40


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 20, 40)
    folder.write_part(30, "rank-0", part_of(30, "rank-0"))
    folder.write_part(60, "rank-0", part_of(60, "rank-0"))
    folder.prune(1)
    assert folder.begun() == [40, 60], "what is newer is under way"
    folder.remove_after(40)
    assert folder.begun() == [40]
    assert newest_of(folder) == (40, "")


def test_what_is_left_of_a_whole_commit_that_was_being_written_once_more_is_removed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 20)
    folder.write_part(40, "rank-0", part_of(40, "rank-0"))
    whole = sorted(path.name for path in folder.of_step(20).iterdir())
    for name in (MANIFEST, "rank-0.safetensors"):
        (folder.of_step(20) / f"{name}.0123abcd{UNFINISHED}").touch()
    folder.remove_unfinished()
    assert folder.begun() == [20]
    assert sorted(path.name for path in folder.of_step(20).iterdir()) == whole
    folder.verify(20)


def test_the_last_ones_stay(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 20, 40, 60)
    folder.prune(2)
    assert folder.steps() == [40, 60]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000040", "step-00000060"]


def test_half_removed_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, 20, 40)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    folder.remove_after(20)
    assert folder.part_file(40, "rank-0").exists()
    assert newest_of(folder) == (20, "")


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        folder = folder_of(disk, 20)
        fill(disk)
        with pytest.raises(CommitFailed) as caught:
            folder.write_part(40, "rank-1", part_of(40, "rank-1"))
        assert newest_of(folder) == (20, "")
    words = str(caught.value)
    assert words.startswith("rank-1 cannot write its part of the commit of step 40: ")
    assert "No space left on device" in words
    assert f"{folder.of_step(40)}" in words
    assert CommitFailed.exit_code == 1


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as caught:
        CommitFolder(tmp_path / "file").make()
    assert str(caught.value) == (
        f"cannot write to --checkpoint-dir {tmp_path}/file: it is a file, and a folder is needed; name another one, "
        "which is made if it is not there"
    )
    with pytest.raises(UsageError, match=f"^cannot write to --checkpoint-dir {tmp_path}/file/in: Not a directory$"):
        CommitFolder(tmp_path / "file" / "in").make()


def test_where_no_part_can_be_there_is_none(tmp_path: Path) -> None:
    """It is looked for while its writer finds out."""
    folder = folder_of(tmp_path, 20)
    folder.of_step(40).write_text("in the way")
    assert folder.entry(20, "rank-0") is not None
    assert folder.entry(30, "rank-0") is None
    assert folder.entry(40, "rank-0") is None


HOLDS = """
import sys
from pathlib import Path
from common.commit.folder import CommitFolder
folder = CommitFolder(Path(sys.argv[1]))
folder.hold()
print("held", flush=True)
sys.stdin.read()
"""


def test_one_job_writes_at_a_time_and_who_is_dead_writes_no_more(tmp_path: Path) -> None:
    folder = CommitFolder(tmp_path)
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout
            assert other.stdout.readline() == "held\n"
            words = (
                rf"another job writes its commits to --checkpoint-dir {tmp_path}: process {other.pid} on \S+; wait for"
            )
            with pytest.raises(UsageError, match=words):
                folder.hold(0.0)
        finally:
            other.kill()
    folder.hold(5.0)
    folder.hold(0.0)  # the next group of the same process
    folder.release()
    folder.release()
