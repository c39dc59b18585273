"""A file holds what is written or what it held before, whatever kills its writer; errors name it and the cause."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from common.errors import FileNotWritten, UsageError
from common.launch.cli import check_writable
from common.system.atomic_file import UNFINISHED, write_file, writing
from tests.support.disks import fill, small_disk
from tests.support.groups import ROOT

KILLED_AT = """
import os, sys
from pathlib import Path
from common.system import atomic_file

def killed(*_):
    os.kill(os.getpid(), 9)

step, path = sys.argv[1], Path(sys.argv[2])
if step == "write":
    with atomic_file.writing(path) as unfinished:
        unfinished.write_bytes(b"ne")
        killed()
elif step == "rename":
    Path.replace = killed
else:
    setattr(*{"fsync": (os, "fsync"), "fsync of the folder": (atomic_file, "sync_folder")}[step], killed)
atomic_file.write_file(path, b"new")
"""
STEPS = {"write": b"old", "fsync": b"old", "rename": b"old", "fsync of the folder": b"new"}


@pytest.mark.parametrize("step", STEPS)
def test_a_writer_killed_between_any_two_steps_leaves_the_file_whole(step: str, tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"old")
    died = subprocess.run([sys.executable, "-c", KILLED_AT, step, str(file)], cwd=ROOT, check=False, timeout=40)
    assert died.returncode == -signal.SIGKILL
    assert file.read_bytes() == STEPS[step]
    assert all(path.name.endswith(UNFINISHED) for path in tmp_path.iterdir() if path != file)


def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: steps.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
    )
    monkeypatch.setattr(Path, "replace", lambda self, to: (steps.append("rename"), replace(self, to))[1])
    write_file(tmp_path / "model", "text")
    assert steps == ["file", "rename", "folder"]
    assert (tmp_path / "model").read_text() == "text"


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, r"No space left on device \(free some space, or name a file elsewhere\)"),
        (errno.EACCES, r"Permission denied \(name a file that you may write\)"),
        (errno.EIO, "Input/output error"),
    ],
)
@pytest.mark.parametrize("failing", [(os, "fsync"), (Path, "replace"), (Path, "write_bytes")], ids=lambda f: f[1])
def test_what_cannot_be_written_is_named_with_its_cause(
    failing: tuple[object, str], number: int, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"old")

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*failing, fails)
    with pytest.raises(FileNotWritten, match=f"^{file} is not written: {cure}; what it held before is whole$"):
        write_file(file, b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        write_file(disk / "model", b"old")
        check_writable("save", disk / "model")
        with pytest.raises(FileNotWritten, match=f"^{disk}/model is not written: No space left on device"):
            write_file(disk / "model", bytes(100_000))
        fill(disk)
        with pytest.raises(UsageError, match=f"^cannot write to --save {disk}/model: No space left on device$"):
            check_writable("save", disk / "model")
        assert (disk / "model").read_bytes() == b"old"
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "model"]


def test_another_exception_keeps_the_old_file_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), writing(tmp_path / "model") as unfinished:
        unfinished.write_bytes(bytes(1 // len(unfinished.name[:0])))
    assert not list(tmp_path.iterdir())


def test_the_mode_stays_and_links_are_followed(tmp_path: Path) -> None:
    file, link = tmp_path / "model", tmp_path / "link"
    file.write_bytes(b"old")
    file.chmod(0o640)
    link.symlink_to("model")
    write_file(link, b"new")
    assert link.is_symlink()
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_what_is_no_file_is_written_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_file(pipe, b"new")
    reader.join(20)
    assert read == [b"new"]
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    check_writable("json", Path("/dev/null"))
