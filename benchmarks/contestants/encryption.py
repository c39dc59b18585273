"""Of contestants over TLS: what goes over the loopback is encrypted too."""

from __future__ import annotations

from common.credentials.credentials import current
from common.network import proofs

__all__ = ["encrypt_if_secure"]


def encrypt_if_secure() -> None:
    """Have this process encrypt all its TCP connections, if it was given credentials; a contestant in plain text was
    given none."""
    proofs.ENCRYPT_LOOPBACK = current().secure
