"""All-gather between trainers (timings, metrics), through server 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import ProtocolError
from common.network.gradsync_pb2 import TrainerMessage
from ps.client.servers import Servers
from ps.planes.protobuf_messages import pieces

__all__ = ["Gathers"]


class Gathers:
    """One after the other, all trainers in the same order."""

    def __init__(self, servers: Servers, nranks: int, epoch: int) -> None:
        self._servers, self._nranks, self._epoch = servers, nranks, epoch
        self._count = 0

    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """See Client.all_gather."""
        mine = np.array(values, order="C")
        sequence, self._count = self._count, self._count + 1
        first = self._servers.sessions[0]
        mine_in_pieces = pieces(mine.tobytes(), epoch=self._epoch, sequence=sequence)
        first.send(TrainerMessage(gather=piece) for piece in mine_in_pieces)
        self._servers.wait(lambda session: session is not first or sequence in session.inbox.gathered, "gathering")
        data = bytes(first.inbox.gathered.pop(sequence))
        if len(data) != self._nranks * mine.nbytes:
            raise ProtocolError(
                f"all_gather: ranks gave {len(data)} bytes together, expected {self._nranks * mine.nbytes}"
            )
        return np.array(np.frombuffer(data, mine.dtype).reshape(self._nranks, *mine.shape))
