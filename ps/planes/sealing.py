"""Checksums of what goes over gRPC where nothing else notices damage: without TLS, which is with --insecure, and not
within a host, as over TCP.

    message | XXH3 of the message (u64), little-endian

Whether a session's messages have one the trainer decides, who opens it with metadata that say so.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64, xxh3_64_intdigest

from common.credentials.credentials import current
from common.errors import ChunkCorrupt
from common.network.rpc import is_loopback

__all__ = ["Sealing", "sealing_of", "sealing_to"]

SEAL = struct.Struct("<Q")
SEALED = ("gradsync-sealed", "xxh3")
Metadata = tuple[tuple[str, str | bytes], ...]


class Sealing:
    """
    Args:
        on: whether messages have a checksum.

    Attributes:
        metadata: of the call that is the session.
    """

    def __init__(self, *, on: bool) -> None:
        self._on = on
        self.metadata: Metadata = (SEALED,) if on else ()

    def seal(self, *parts: bytes | memoryview) -> bytes:
        """What goes over the wire, of a message's parts; they are copied once, and must stay as they are meanwhile."""
        if not self._on:
            return b"".join(parts)
        found = xxh3_64()
        for part in parts:
            found.update(part)
        return b"".join((*parts, SEAL.pack(found.intdigest())))

    def unseal(self, data: bytes, sender: str) -> bytes | memoryview:
        """The message, where it is.

        Raises:
            ChunkCorrupt: it is not as it was sent.
        """
        if not self._on:
            return data
        message, seal = memoryview(data)[: -SEAL.size], data[-SEAL.size :]
        if seal != SEAL.pack(xxh3_64_intdigest(message)):
            raise ChunkCorrupt(
                f"data from {sender} were damaged on their way ({len(data):,} bytes whose checksum is another); look "
                "for a faulty network card or memory"
            )
        return message


def sealing_to(host: str) -> Sealing:
    """What a trainer does in a session with a server there, by this process's credentials."""
    return Sealing(on=not (current().secure or is_loopback(host)))


def sealing_of(metadata: Metadata) -> Sealing:
    """What a server does in a session that was opened with these."""
    return Sealing(on=SEALED in metadata)
