"""Files and folders that only their user may read or write: made so, and refused otherwise."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from common.errors import UsageError

__all__ = [
    "OTHERS_READ",
    "OTHERS_WRITE",
    "make_once",
    "make_private",
    "open_private",
    "private_folder",
    "read_private",
    "user_folder",
]

OTHERS_READ = 0o077  # any right of the group or of others
OTHERS_WRITE = 0o022
MOST_BYTES = 1 << 20  # of a key or a token, whatever a file's name leads to


def user_folder() -> Path:
    """The folder in /tmp that is named after this user."""
    return Path(tempfile.gettempdir()) / f"gradsync-{os.geteuid()}"


def private_folder(candidates: Iterable[Path], *, refused_rights: int) -> Path:
    """The first of these folders that is ours, and where others have none of these rights; made if need be.

    Raises:
        PermissionError: there is none.
    """
    refused = []
    for folder in candidates:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
            if found.st_uid != os.geteuid():
                refused.append(f"{folder} belongs to another user")
            elif stat.S_IMODE(found.st_mode) & refused_rights:
                does = "write to" if refused_rights == OTHERS_WRITE else "read"
                refused.append(f"others can {does} {folder}")
            elif os.access(folder, os.W_OK):
                return folder
            else:
                refused.append(f"{folder} is read-only")
        except OSError as error:
            refused.append(str(error))
    raise PermissionError("; ".join(refused))


def make_private(path: Path, contents: bytes) -> None:
    """Write a new file that only its user can read.

    Raises:
        UsageError: it is there already, or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as exc:
        raise UsageError(f"{path} is there already, and is never overwritten; choose another name") from exc
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}") from exc
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)  # also under an umask that takes the owner's rights
        file.write(contents)


def open_private(path: Path, *, further: bool = False) -> BinaryIO:
    """A file to be written anew, which only its user can read, whoever could before.

    Args:
        further: write on at its end instead.

    Raises:
        OSError: it cannot be.
    """
    where = os.O_APPEND if further else os.O_TRUNC
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | where | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # where the file system has no rights, or it is another user's
        os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "wb")


def make_once(path: Path, contents: bytes) -> None:
    """As `make_private`, whole or not at all; the first of several processes makes it, and the others leave it so."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    make_private(draft, contents)
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def read_private(path: Path, what: str) -> bytes:
    """What this file holds.

    Args:
        what: it is called in errors ("the token file").

    Raises:
        UsageError: others can read it too, or it cannot be read.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(f"{what} {path} is no file")
            if found.st_mode & OTHERS_READ:
                raise UsageError(f"{what} {path} can be read by others; chmod 600 {path}")
            return file.read(MOST_BYTES)
    except OSError as exc:
        raise UsageError(f"cannot read {what} {path}: {exc.strerror}") from exc
