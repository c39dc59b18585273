"""The user's own secret: what processes of one user on one host share without being told.

It lies in gradsync/ in $XDG_RUNTIME_DIR or /run/user/UID, or else in a folder of this user's in /tmp, and is made at
its first use.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from common.errors import UsageError
from common.system.private_files import OTHERS_READ, make_once, private_folder, read_private, user_folder

__all__ = ["user_secret"]

SECRET_BYTES = 32
NAME = "secret"


def user_secret() -> bytes:
    """
    Raises:
        UsageError: it cannot be made or read, or others could read it.
    """
    try:
        folder = private_folder(_candidates(), refused_rights=OTHERS_READ)
    except PermissionError as exc:
        raise UsageError(
            f"no folder for this user's secret ({exc}); set XDG_RUNTIME_DIR to a folder that only you can read"
        ) from exc
    path = folder / NAME
    if not path.exists():
        make_once(path, secrets.token_bytes(SECRET_BYTES))
    if path.stat().st_uid != os.geteuid():
        raise UsageError(f"{path} belongs to another user; remove it, and a new one is made")
    secret = read_private(path, "this user's secret")
    if len(secret) != SECRET_BYTES:
        raise UsageError(f"{path} does not hold {SECRET_BYTES} bytes; remove it, and a new one is made")
    return secret


def _candidates() -> Iterator[Path]:
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "gradsync"
    usual = Path(f"/run/user/{os.geteuid()}")  # so that processes of a login and of a timer, without it, agree
    if usual.is_dir():
        yield usual / "gradsync"
    yield user_folder()
