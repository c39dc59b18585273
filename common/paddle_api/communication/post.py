"""Arrays from one member of a group to another, with a header that says what they are: a wrong one is refused.

    header length, 4 bytes | [call, ranks, dtype, shape] as JSON, padded with blanks | elements

Up to TOGETHER bytes they are one message; what is larger follows in a second one, so that nobody copies it.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.errors import ProtocolError
from common.paddle_api.communication.tensors import Array
from common.sync.messenger import Messenger

__all__ = ["Post"]

LENGTH = struct.Struct("<I")
ALIGNED = 64  # where elements begin
TOGETHER = 65_536
MOST_DIMENSIONS = 64  # of an array, as NumPy has it


class Post:
    """One member's end, on a channel of the group's own.

    Args:
        ranks: of the members, as the messenger counts.
    """

    def __init__(self, messenger: Messenger, ranks: Sequence[int], channel: int) -> None:
        self._messenger, self._channel = messenger, channel
        self._ranks = zlib.crc32(json.dumps([*ranks]).encode())

    def send(self, to: int, call: str, array: Array) -> None:
        """Send a contiguous array to rank `to`; it may be changed when this returns."""
        header = json.dumps([call, self._ranks, array.dtype.name, array.shape]).encode()
        header = header.ljust(-(-(len(header) + LENGTH.size) // ALIGNED) * ALIGNED - LENGTH.size)
        head, body = LENGTH.pack(len(header)) + header, array.reshape(-1).view(np.uint8).data
        if len(body) <= TOGETHER:
            self._messenger.send(to, self._channel, head + body)
        else:
            self._messenger.send(to, self._channel, head)
            self._messenger.send(to, self._channel, body)

    def receive(self, source: int, call: str, dtype: np.dtype[Any], shape: Sequence[int] | None) -> Array:
        """What rank `source` sends next, of this dtype and shape (apart from dimensions of 1); the caller's.

        Args:
            shape: None: of one dimension, as long as it may be.

        Raises:
            ProtocolError: it sends something else.
        """
        message = self._messenger.receive(source, self._channel)
        sent = self._header(source, message)
        if sent[1] != self._ranks:
            raise ProtocolError(
                f"rank {source} made {sent[0]} on a group of other ranks than this rank, {call}; all ranks must call "
                "new_group in the same order with the same ranks"
            )
        expected = [call, self._ranks, dtype.name, [1] if shape is None else list(shape)]
        mine, theirs = said(expected, known=shape is not None), said(sent, known=shape is not None)
        if mine != theirs:
            raise ProtocolError(
                f"rank {source} made {theirs}, this rank {mine}; all ranks must make the same calls in the same order, "
                "with tensors of the same dtype and shape"
            )
        where, nbytes = LENGTH.size + LENGTH.unpack_from(message)[0], math.prod(sent[3]) * dtype.itemsize
        body = memoryview(message)[where:]
        if nbytes > TOGETHER:
            body = memoryview(self._messenger.receive(source, self._channel))
        if len(body) != nbytes:
            raise ProtocolError(f"rank {source} sent {len(body)} bytes in {theirs}, expected {nbytes}")
        return np.frombuffer(body, dtype).reshape(sent[3] if shape is None else shape)

    def comes(self, source: int, seconds: float) -> bool:
        """Whether what rank `source` sends next begins to come within so many seconds."""
        return self._messenger.comes(source, self._channel, seconds)

    def _header(self, source: int, message: bytearray) -> list[Any]:
        try:
            (length,) = LENGTH.unpack_from(message)
            call, ranks, dtype, shape = json.loads(bytes(message[LENGTH.size : LENGTH.size + length]))
            found: list[Any] = [str(call), int(ranks), str(dtype), [int(n) for n in shape]]
        except (struct.error, ValueError, TypeError, OverflowError, RecursionError) as exc:
            raise ProtocolError(f"rank {source} sent no header: {exc}") from exc
        if len(shape) > MOST_DIMENSIONS or not all(0 <= n < 1 << 63 for n in found[3]):
            raise ProtocolError(f"rank {source} sent a header of shape {str(shape)[:80]}")
        return found


def said(header: Sequence[Any], *, known: bool) -> str:
    """A header in words, in which shapes that count as the same are the same."""
    call, _, dtype, shape = header
    kind = "bfloat16" if dtype == "uint16" else dtype
    return f"{call} of {kind} {[n for n in shape if n != 1] or [1]}" if known else f"{call} of {kind}"
