"""Checksums of what goes over gRPC where nothing else notices damage: without TLS, which is with --insecure.

    message | XXH3 of the message (u64), little-endian

Whether there is one both ends find by their credentials.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest

from common.credentials.credentials import current
from common.errors import ChunkCorrupt

__all__ = ["Sealing", "sealing"]

SEAL = struct.Struct("<Q")


class Sealing:
    """
    Args:
        on: whether messages have a checksum.
    """

    def __init__(self, *, on: bool) -> None:
        self._on = on

    def seal(self, message: bytes) -> bytes:
        """What goes over the wire."""
        return message + SEAL.pack(xxh3_64_intdigest(message)) if self._on else message

    def unseal(self, data: bytes, sender: str) -> bytes:
        """The message.

        Raises:
            ChunkCorrupt: it is not as it was sent.
        """
        if not self._on:
            return data
        message, seal = data[: -SEAL.size], data[-SEAL.size :]
        if seal != SEAL.pack(xxh3_64_intdigest(message)):
            raise ChunkCorrupt(
                f"data from {sender} were damaged on their way ({len(data):,} bytes whose checksum is another); look "
                "for a faulty network card or memory"
            )
        return message


def sealing() -> Sealing:
    """By this process's credentials."""
    return Sealing(on=not current().secure)
