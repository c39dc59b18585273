"""What a trainer does with that which comes over its data connection with a server."""

from __future__ import annotations

import numpy as np

from common.errors import GradSyncError, ProtocolError
from common.network.gradsync_pb2 import ServerMessage
from ps.client.inbox import Inbox
from ps.planes.tcp_plane import bytes_for
from ps.planes.wire_format import told_by

__all__ = ["FromServer"]


class FromServer:
    """Words are received where they belong, other messages go into the inbox; a Receiver."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        inbox.words_come = True
        self._bytes: memoryview | None = None  # of a message without words

    def place(self, tag: bytes, nbytes: int) -> memoryview | None:
        found = told_by(ServerMessage, tag)
        if found is None:
            self._bytes = bytes_for(nbytes, self._inbox.name)
            return self._bytes
        if not nbytes or nbytes % 4:
            raise ProtocolError(f"{self._inbox.name} announced {nbytes:,} bytes of parameters")
        place = self._inbox.place(found[1], nbytes // 4)
        return None if place is None else memoryview(place.view(np.uint8).data)

    def take(self) -> None:
        data, self._bytes = self._bytes, None
        if data is None:
            self._inbox.took_words()
        else:
            self._inbox.take(ServerMessage.FromString(data.tobytes()))

    def ended(self, error: Exception | None) -> None:
        if error is None:
            self._inbox.hung_up()
        else:
            self._inbox.fail(error if isinstance(error, GradSyncError) else GradSyncError(repr(error)))
