"""Results as files that are there whole or not at all: whatever kills their writer, the file of before stays whole.

    writing(path):  NAME.RANDOM.new in the same folder  ->  fsync  ->  rename to NAME  ->  fsync of the folder

rename(2) replaces the name in one step; the first fsync keeps a crash of the machine from doing that before the bytes
are there ("Files Are Hard", danluu.com/file-consistency), the second from undoing it. A writer that is killed in
between leaves its NAME.RANDOM.new behind.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import FileNotWritten

__all__ = ["UNFINISHED", "not_written", "sync_folder", "why_not_writable", "write_file", "writing"]

UNFINISHED = ".new"  # how a name ends whose file is being written
CURES = {
    errno.ENOSPC: "free some space, or name a file elsewhere",
    errno.EDQUOT: "free some space, or name a file elsewhere",
    errno.EFBIG: "raise the limit on a file's size (ulimit -f)",
    errno.EACCES: "name a file that you may write",
    errno.EPERM: "name a file that you may write",
    errno.EROFS: "name a file elsewhere",
}


def unwatched(stage: str) -> None:
    """Nobody waits for a stage of a file."""


def write_file(path: Path, content: bytes | str, *, reached: Callable[[str], None] = unwatched) -> None:
    """Have the file hold this, text as UTF-8, or what it held before.

    Args:
        reached: is called with each of STAGES (common/system/fault_points.py).

    Raises:
        FileNotWritten: it holds what it held before.
    """
    with writing(path, reached) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def writing(path: Path, reached: Callable[[str], None] = unwatched) -> Iterator[Path]:
    """The name to write to instead of `path`; at the end its file takes the place, unless an exception comes first.

    A link is followed. What is no regular file, as /dev/stdout or a pipe, is written as it is.

    Raises:
        FileNotWritten: for an OSError, inside too; the file holds what it held before.
    """
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            yield path
            return
        unfinished = target.with_name(f"{target.name}.{secrets.token_hex(4)}{UNFINISHED}")
        try:
            yield unfinished
            _put_in_place(unfinished, target, reached)
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
    except OSError as exc:
        raise not_written(path, exc) from exc


def not_written(path: Path, exc: OSError) -> FileNotWritten:
    why, cure = exc.strerror or str(exc), CURES.get(exc.errno or 0)
    kept = "; what it held before is whole" if path.is_file() else ""
    return FileNotWritten(f"{path} is not written: {why}{f' ({cure})' if cure else ''}{kept}")


def sync_folder(folder: Path) -> None:
    """Have names that were made, renamed or removed in it survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def why_not_writable(folder: Path) -> str:
    """What keeps this folder from taking a page more, in the system's words; "" if nothing does."""
    probe = folder / f"{secrets.token_hex(4)}{UNFINISHED}"
    try:
        with probe.open("xb") as file:
            file.write(bytes(os.sysconf("SC_PAGE_SIZE")))
            file.flush()
            os.fsync(file.fileno())
    except OSError as exc:
        return exc.strerror or str(exc)
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return ""


def _put_in_place(unfinished: Path, target: Path, reached: Callable[[str], None]) -> None:
    reached("written")
    with unfinished.open("rb") as file:
        with suppress(FileNotFoundError):
            os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
        os.fsync(file.fileno())
    reached("synced")
    unfinished.replace(target)
    reached("renamed")
    sync_folder(target.parent)
