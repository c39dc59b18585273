"""The parameter-server scheme: gradients go to the servers, which update, and the new parameters come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from common.sync.guard import UNGUARDED
from common.sync.overlap import LaunchOrder
from common.sync.synchronizer import ServerOptimizer, Synchronizer
from common.sync.trace import FINISH
from common.tensors.arena import Arena, FloatArray
from common.tensors.optimizers import Optimizer
from common.tensors.updater import make_updater
from ps.client.client import Client
from ps.store.modes import SYNC

__all__ = ["GeoSynchronizer", "ServerSynchronizer", "synchronizer_for"]


def synchronizer_for(
    client: Client, *, overlap: bool = True, connect: Callable[[str], Client] | None = None
) -> ServerSynchronizer:
    """What trains in the client's mode; `connect` as of ServerSynchronizer, of sync mode only."""
    if client.mode == SYNC:
        return ServerSynchronizer(client, overlap=overlap, connect=connect)
    kind = GeoSynchronizer if client.mode.name == "geo" else ServerSynchronizer
    return kind(client, overlap=overlap)


class ServerSynchronizer(Synchronizer):
    """Pushes each bucket as it becomes final; servers take it beside backward, and update with it if the learning rate
    was announced.

    Args:
        overlap: push beside backward, not when it is done.
        update: who applies the optimizer of a user's program; see ServerOptimizer.choice.
        connect: joins the group that comes after this one, at servers with these addresses; None: this one is the last.
    """

    scheme, backend = "ps", "grpc"

    def __init__(
        self,
        client: Client,
        *,
        overlap: bool = True,
        update: str = "auto",
        connect: Callable[[str], Client] | None = None,
    ) -> None:
        self._be_with(client, update)
        self._connect, self.can_rejoin = connect, connect is not None
        self._overlap = overlap
        self.rank, self.nranks, self.servers = client.rank, client.nranks, len(client.servers)
        self.mode, self.staleness = str(client.mode), client.mode.staleness

    def _be_with(self, client: Client, update: str) -> None:
        self._client = self.traced_servers = client
        self.twice_counted = 0  # steps
        self.messenger = client.messenger
        self.server_optimizer = OptimizerByClient(self, client, update)

    def empty(self, count: int) -> FloatArray:
        return self._client.empty(count)

    def attach(self, arena: Arena, optimizer: Optimizer | None) -> None:
        self._order = LaunchOrder(len(arena.buckets))
        self._has_optimizer = optimizer is not None
        self.trace.name_buckets([4 * bucket.length for bucket in arena.buckets])
        self._client.trace = self.trace
        self._client.register(arena, optimizer, commits=self.commits)
        self.backend = self._client.data_plane

    def announce(self, learning_rate: float) -> None:
        if self._overlap:
            self._client.commit_ahead(learning_rate, hold=True)

    def mark_ready(self, bucket: int) -> None:
        self.trace.moment("ready", bucket)
        ready = self._order.mark(bucket)
        if self._overlap:
            self._push(ready)

    def launch_in(self, order: Sequence[int]) -> None:
        self._order.follow(order)

    def finish(self, learning_rate: float) -> None:
        with self.trace.span(FINISH):
            self.push_rest()
            if self._has_optimizer:
                self._client.commit(learning_rate)
            else:
                self._client.average()

    def settle(self) -> None:
        if self._client.mode != SYNC:
            self._client.all_gather(np.zeros(1, np.uint8))  # when all are here, all that they have sent is applied
            self._client.pull()

    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._client.all_gather(values)

    def leave(self, reason: str) -> None:
        self._client.close(reason)

    def rejoin(self, rendezvous: str) -> None:
        assert self._connect
        self._be_with(self._connect(rendezvous), self.server_optimizer.choice if self.server_optimizer else "auto")

    def another(self) -> ServerSynchronizer:
        further = type(self)(self._client.another(), overlap=self._overlap)
        if self.server_optimizer is not None and further.server_optimizer is not None:
            further.server_optimizer.choice = self.server_optimizer.choice
        return further

    def close(self, reason: str = "") -> None:
        self._client.close(reason)
        self.guard = UNGUARDED

    def push_rest(self) -> None:
        """Push what was not marked; a new step begins.

        Raises:
            NonFiniteGradient: a bucket of this step was refused, by this rank or first by another one.
        """
        if not self._overlap:
            self._order.reset()
        self._push(self._order.rest())
        self._order.reset()
        self._refuse_what_is_not_finite()

    def _push(self, buckets: Sequence[int]) -> None:
        later = self.guard.only_warns and self.server_optimizer is not None and self.server_optimizer.looks_later
        for bucket in buckets:
            if later or not self.guard.look(bucket, self._programs_step):  # without it the step cannot end
                self._client.push(bucket)

    def look_at_all(self) -> None:
        """Have the guard look at all gradients of this step."""
        for bucket in range(self._order.count):
            self.guard.look(bucket, self._programs_step)

    @property
    def _programs_step(self) -> int:
        """As the program counts: the servers count one that averages and then updates as two."""
        return self._client.step - self.twice_counted

    def _refuse_what_is_not_finite(self) -> None:
        if self.guard.found:
            raise self._client.refuse(self.guard.error())


class OptimizerByClient(ServerOptimizer):
    """The steps of a ServerSynchronizer that the servers end with an update of the user's optimizer."""

    def __init__(self, synchronizer: ServerSynchronizer, client: Client, choice: str) -> None:
        self._synchronizer, self._client, self.choice = synchronizer, client, choice

    def configure(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        self._client.configure(optimizer, names)

    def update(self, learning_rate: float, *, used: bytes, again: bool = False, replaced: bool = False) -> None:
        with self._synchronizer.trace.span(FINISH):
            if not again:
                self._synchronizer.push_rest()
            self._client.commit(learning_rate, used=used, again=again, replaced=replaced)
        self._synchronizer.twice_counted += again
        self.updates += 1

    def look_back(self) -> None:
        self._synchronizer.look_at_all()

    def keep(self, updates: int, step: int) -> None:
        self.updates = updates
        self._client.keep(updates, step)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return self._client.optimizer_state()

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self._client.load_optimizer_state(state)


class GeoSynchronizer(ServerSynchronizer):
    """Updates its own parameters with its own optimizer, and tells the servers every k steps by how much they have
    changed since it read the servers'."""

    def attach(self, arena: Arena, optimizer: Optimizer | None) -> None:
        super().attach(arena, optimizer)
        self._arena, self._taken, self._step = arena, 0, 0
        self._read = arena.parameters.copy()
        self._updater = make_updater(optimizer, arena.parameters, arena.gradients)

    def mark_ready(self, bucket: int) -> None:
        self.trace.moment("ready", bucket)
        self._order.mark(bucket)

    def finish(self, learning_rate: float) -> None:
        self._client.check()
        self._order.reset()
        for bucket in range(self._order.count):
            self.guard.look(bucket, self._step)
        self._refuse_what_is_not_finite()
        self._step += 1
        with self.trace.span(FINISH):
            with self.trace.span("update"):
                self._updater.step(learning_rate)
            self._taken += 1
            if self._taken == self._client.mode.number:
                self._exchange(learning_rate)

    def settle(self) -> None:
        if self._taken:
            self._exchange(0.0)
        super().settle()

    def _exchange(self, learning_rate: float) -> None:
        for number, bucket in enumerate(self._arena.buckets):
            run = slice(bucket.start, bucket.stop)
            now, read, change = (
                array[run].view(bucket.dtype) for array in (self._arena.parameters, self._read, self._arena.gradients)
            )
            np.subtract(now, read, out=change)
            self._client.push(number)
        self._client.commit(learning_rate)
        self._read[...] = self._arena.parameters
        self._taken = 0
