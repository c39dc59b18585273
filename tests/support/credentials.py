"""Credentials for tests of connections, and connections that are encrypted though both ends are on this host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from common.credentials import credentials
from common.credentials.credentials import Credentials
from common.network import proofs

__all__ = ["encrypted", "with_secret"]


def with_secret(number: int) -> Credentials:
    """Of a job with a token; equal numbers, equal tokens."""
    return Credentials("token", f"test {number}", bytes([number]) * 32)


@contextmanager
def encrypted(number: int = 1) -> Iterator[None]:
    """Every TCP connection that members of the job open is over TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proofs, "ENCRYPT_LOOPBACK", True)
        patch.setattr(credentials, "_in_use", with_secret(number))
        yield
