"""Tokens: 256 random bits that the hosts of one job share, in a form that is told apart from a password.

    gradsync-token-1-<43 characters of base64url>-<8 hexadecimal digits of a checksum>

A certificate that is derived from a token can be seen by anyone, and a weak token guessed from it. So only tokens that
were made here are taken.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from pathlib import Path

from common.errors import UsageError
from common.system.private_files import make_private, read_private

__all__ = ["MAKE_TOKEN", "TOKEN_BYTES", "make_token", "new_token", "read_token", "secret_of", "token_of"]

TOKEN_BYTES = 32
PREFIX = "gradsync-token-1-"
FORM = re.compile(rf"{PREFIX}([A-Za-z0-9_-]{{43}})-([0-9a-f]{{8}})", re.ASCII)
MAKE_TOKEN = "python -m common.credentials token FILE"


def new_token() -> str:
    return token_of(secrets.token_bytes(TOKEN_BYTES))


def token_of(secret: bytes) -> str:
    """The token of these 256 bits; `secret_of` turns it back."""
    body = base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    return f"{PREFIX}{body}-{_checksum(body)}"


def make_token(path: Path) -> None:
    """Write a new token to a new file that only its user can read.

    Raises:
        UsageError: the file is there already, or cannot be written.
    """
    make_private(path, f"{new_token()}\n".encode())


def read_token(path: Path) -> bytes:
    """The secret of the token in that file.

    Raises:
        UsageError: others can read the file, or it holds no token.
    """
    text = read_private(path, "the token file")
    return secret_of(text.decode("ascii", "replace"), f"the token file {path}")


def secret_of(token: str, source: str) -> bytes:
    """The 256 bits of a token.

    Args:
        source: where it comes from, for errors; these never show any of the token.

    Raises:
        UsageError: it is none of ours, or was cut or mistyped.
    """
    found = FORM.fullmatch(token.strip())
    if found is None:
        raise UsageError(f"{source} holds no GradSync token; make one with {MAKE_TOKEN}")
    body, checksum = found.groups()
    secret = base64.urlsafe_b64decode(body + "=")
    if token_of(secret) != f"{PREFIX}{body}-{checksum}":
        raise UsageError(f"{source} holds a damaged token: its checksum is wrong; copy it again")
    return secret


def _checksum(body: str) -> str:
    return hashlib.sha256(f"{PREFIX}{body}".encode()).hexdigest()[:8]
