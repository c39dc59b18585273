"""The parameter-server scheme: gradients go to the servers, which update, and the new parameters come back."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from common.arena import Arena
from common.optimizers import Optimizer
from common.overlap import LaunchOrder
from common.synchronizer import Synchronizer
from ps.client import Client

__all__ = ["ServerSynchronizer"]


class ServerSynchronizer(Synchronizer):
    """Pushes each bucket as it becomes final; gRPC's own threads send it beside backward."""

    scheme, backend = "ps", "grpc"

    def __init__(self, client: Client, *, overlap: bool = True) -> None:
        self._client = client
        self._overlap = overlap
        self.rank, self.nranks, self.servers = client.rank, client.nranks, len(client.servers)

    def attach(self, arena: Arena, optimizer: Optimizer | None) -> None:
        self._order = LaunchOrder(len(arena.buckets))
        self._client.register(arena, optimizer)

    def mark_final(self, bucket: int) -> None:
        ready = self._order.mark(bucket)
        if self._overlap:
            self._push(ready)

    def finish(self, learning_rate: float) -> None:
        self._push(self._order.rest() if self._overlap else range(self._order.count))
        self._order.reset()
        self._client.commit(learning_rate)

    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._client.all_gather(values)

    def close(self, reason: str = "") -> None:
        self._client.close(reason)

    def _push(self, buckets: range) -> None:
        for bucket in buckets:
            self._client.push(bucket)
