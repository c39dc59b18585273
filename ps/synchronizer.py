"""The parameter-server scheme: gradients go to the servers, which update, and the new parameters come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from common.arena import Arena, FloatArray
from common.optimizers import Optimizer
from common.overlap import LaunchOrder
from common.synchronizer import ServerUpdates
from ps.client import Client

__all__ = ["ServerSynchronizer"]


class ServerSynchronizer(ServerUpdates):
    """Pushes each bucket as it becomes final; gRPC's own threads send it beside backward."""

    scheme, backend = "ps", "grpc"

    def __init__(self, client: Client, *, overlap: bool = True) -> None:
        self._client = client
        self._overlap = overlap
        self.rank, self.nranks, self.servers = client.rank, client.nranks, len(client.servers)

    def empty(self, count: int) -> FloatArray:
        return self._client.empty(count)

    def attach(self, arena: Arena, optimizer: Optimizer | None) -> None:
        self._order = LaunchOrder(len(arena.buckets))
        self._has_optimizer = optimizer is not None
        self._client.register(arena, optimizer)
        self.backend = self._client.data_plane

    def mark_final(self, bucket: int) -> None:
        ready = self._order.mark(bucket)
        if self._overlap:
            self._push(ready)

    def launch_in(self, order: Sequence[int]) -> None:
        self._order.follow(order)

    def finish(self, learning_rate: float) -> None:
        self._push_rest()
        if self._has_optimizer:
            self._client.commit(learning_rate)
        else:
            self._client.average()

    def configure(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        self._client.configure(optimizer, names)

    def update(self, learning_rate: float, *, used: bytes, again: bool = False, replaced: bool = False) -> None:
        if not again:
            self._push_rest()
        self._client.commit(learning_rate, used=used, again=again, replaced=replaced)

    def optimizer_state(self) -> dict[str, npt.NDArray[Any]]:
        return self._client.optimizer_state()

    def load_optimizer_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self._client.load_optimizer_state(state)

    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._client.all_gather(values)

    def close(self, reason: str = "") -> None:
        self._client.close(reason)

    def _push_rest(self) -> None:
        if not self._overlap:
            self._order.reset()
        self._push(self._order.rest())
        self._order.reset()

    def _push(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            self._client.push(bucket)
