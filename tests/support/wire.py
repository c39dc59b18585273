"""Messages of servers and trainers as they go over the wire."""

from __future__ import annotations

from common.network.gradsync_pb2 import ServerMessage, TrainerMessage
from ps.planes.wire_format import Outgoing, parts_of

__all__ = ["to_bytes"]


def to_bytes(message: Outgoing | TrainerMessage | ServerMessage) -> bytes:
    return b"".join(parts_of(message))
