"""A trainer's side of the parameter server: everything that it can ask of the servers, each in a place of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from common.commit.plan import NO_COMMITS, CommitPlan
from common.errors import GradSyncError, UsageError, choose
from common.launch.outsiders import check_rank_aloud
from common.network import rpc
from common.network.gradsync_pb2 import Failure, Goodbye, TrainerMessage
from common.sync.trace import ServerAnswer, Trace
from common.system.fault_points import reach
from common.system.process import forget_in_children, note_joined, note_joining, restarts
from common.tensors.arena import Arena, FloatArray
from common.tensors.optimizers import Optimizer
from ps.client.data_planes import DataPlanes
from ps.client.gathering import Gathers
from ps.client.inbox import FAREWELL_S
from ps.client.joining import introduce_outsider, join, join_again
from ps.client.messenger import ServerMessenger
from ps.client.optimizer_state import OptimizerState
from ps.client.servers import Servers
from ps.client.steps import Steps
from ps.planes.plane import DATA_PLANES
from ps.planes.protobuf_messages import MOST_SLOTS, describe
from ps.planes.tcp_plane import MESSAGE_BYTES
from ps.store.modes import SYNC, Mode
from ps.store.shards import plan_shards

__all__ = ["Client"]


class Client:
    """One trainer's membership in a group of `nranks` trainers and `servers`, for one model; a context manager.

    Every blocking method waits at most `timeout` seconds for the other processes. A forked child has no part in it.

    Args:
        data_plane: how gradients and parameters travel: "shm", read and written where they lie, by processes of one
            host; "tcp", over a connection of their own; "grpc", in messages; "auto": the first of these that reaches
            the server.
        first: the client of the first model, if this is to be one of a further one; see `another`.

    Attributes:
        messenger: to the other trainers, whatever the model.

    Raises:
        PeerUnreachable, RendezvousError, VersionMismatch, UsageError: the group did not come together.
    """

    def __init__(
        self,
        servers: Sequence[str],
        rank: int,
        nranks: int,
        *,
        timeout: float = 30.0,
        data_plane: str = "auto",
        mode: Mode = SYNC,
        first: Client | None = None,
    ) -> None:
        check_rank_aloud(rank, nranks, partial(introduce_outsider, servers, rank, nranks))
        self.servers, self.rank, self.nranks, self.timeout, self.mode = tuple(servers), rank, nranks, timeout, mode
        self.epoch = restarts()
        self._asked = choose("data plane", data_plane, DATA_PLANES)
        self._planes = DataPlanes(self._asked, rank, nranks, mode, timeout)
        self._servers = Servers(rank, nranks, timeout, self.epoch)
        self._steps = Steps(self._servers, rank, self.epoch)
        self._optimizer_state = OptimizerState(self._servers, rank, self.epoch)
        self._gathers = Gathers(self._servers, nranks, self.epoch)
        self._channels = ExitStack()
        self._process = os.getpid()
        self._first = first or self
        self._models = 1  # that there have been, if this is the first
        self._further: list[Client] = []  # those that are open
        self.messenger: ServerMessenger = (
            first.messenger if first else ServerMessenger(self._servers, rank, nranks, self.epoch, self._check_process)
        )
        forget_in_children(self)
        try:
            self._join()
        except BaseException as exc:
            self.close(f"{type(exc).__name__}: {exc}")
            raise

    def _join(self) -> None:
        rank, nranks, epoch, timeout = self.rank, self.nranks, self.epoch, self.timeout
        if self._first is not self:
            self._first._further.append(self)
            model = self._first._models
            self._first._models += 1
            for session in self._first._servers.sessions:
                joined = join_again(session.joined, model, rank=rank, nranks=nranks, epoch=epoch, timeout=timeout)
                self._servers.open(joined)
            return
        note_joining(nranks)
        for index in range(len(self.servers)):
            joined = join(self.servers, index, self._channels, rank=rank, nranks=nranks, epoch=epoch, timeout=timeout)
            self._servers.open(joined)
        note_joined()

    def another(self) -> Client:
        """Of a further model of the same group, with an arena and an optimizer of its own; all trainers call it in the
        same order. It ends by itself, or with the first one.

        Raises:
            UsageError: the servers have too many models.
        """
        first = self._first
        first._check_process()
        return Client(
            self.servers,
            self.rank,
            self.nranks,
            timeout=self.timeout,
            data_plane=self._asked,
            mode=self.mode,
            first=first,
        )

    @property
    def step(self) -> int:
        """How many steps have ended."""
        return self._steps.step

    @property
    def gradients(self) -> FloatArray:
        """What is pushed, or after `average`, the mean."""
        return self._steps.gradients

    @property
    def trace(self) -> Trace:
        """Where it is recorded what is done when; to be set before `register`."""
        return self._steps.trace

    @trace.setter
    def trace(self, trace: Trace) -> None:
        self._steps.trace = trace

    @property
    def data_plane(self) -> str:
        """What carries the data: "shm", "tcp", "grpc", or "tcp+shm" where it is not the same with all servers."""
        return "+".join(sorted({session.plane.name for session in self._servers.sessions}, reverse=True))

    def empty(self, count: int, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """A new 1-D array of zeros, 64-byte aligned, that servers of this host reach without a copy."""
        return self._planes.memory.empty(count, dtype)

    def register(self, arena: Arena, optimizer: Optimizer | None, *, commits: CommitPlan = NO_COMMITS) -> None:
        """Agree on layout and optimizer; `arena.parameters` becomes rank 0's. Blocks until all trainers have called.

        The arena is used by every later call, and must outlive the client. Without an optimizer there is none until
        `configure`, and steps end with `average`. With one, in sync mode, parameters from `empty` may become memory
        common to all trainers of the host, which only servers may write to.

        Args:
            commits: of which servers keep their parts, each in its --checkpoint-dir.

        Raises:
            UsageError: the data plane is to be shm or tcp, and a server cannot be reached so; or there is no optimizer,
                without which the mode must be sync.
        """
        self._check_process()
        if self.mode != SYNC and not optimizer:
            raise UsageError(f"mode {self.mode} needs the optimizer when the training begins; use mode sync")
        self._layout, sessions = arena.layout, self._servers.sessions
        for session, shard in zip(sessions, plan_shards(arena.layout.length, len(sessions)), strict=True):
            session.inbox.begin(shard, arena.parameters)
        message = describe(arena, optimizer, rank=self.rank, epoch=self.epoch)
        if len(message.slots) > MOST_SLOTS or message.ByteSize() > MESSAGE_BYTES:
            raise UsageError(
                f"a model of {len(message.slots):,} parameters cannot be registered, at most {MOST_SLOTS:,}; names "
                f"and shapes take {message.ByteSize():,} bytes, at most {MESSAGE_BYTES:,}"
            )
        if self.mode != SYNC:
            message.mode = str(self.mode)
        message.trace = self.trace.active
        message.commit_every, message.first_step = commits.every, commits.first
        for session, mine in zip(sessions, self._planes.offers(message, sessions, arena), strict=True):
            session.send([TrainerMessage(register=mine)])
        self._steps.send_parameters(arena)
        self._servers.wait(self._planes.has_answered, "registering")
        with self._servers.within_reach():
            self._planes.settle(sessions, arena)
        self._steps.begin(arena, updates=self.mode == SYNC and optimizer is not None)
        self._steps.fetch(arena.parameters)

    def gradients_in(self, array: FloatArray) -> None:
        """Push from this array, of the arena's length, from now on, and have averages written there."""
        self._steps.gradients_in(array)

    def push(self, bucket: int) -> None:
        """Send a bucket's gradients, each server its part. Returns at once; they must stay as they are until `commit`
        has returned."""
        self._check_process()
        self._steps.push(bucket)

    def commit_ahead(self, learning_rate: float, *, hold: bool = False) -> None:
        """Tell the servers that the step under way will end with an update at this learning rate: they then update
        what they average at once, and send what is new while other gradients are still being pushed. Only in sync mode
        and with an optimizer; elsewhere nothing happens until `commit`.

        Args:
            hold: parameters stay as they are until `commit`, which only those can that come over gRPC: elsewhere
                nothing happens. Otherwise they may change at once.
        """
        self._check_process()
        self._steps.commit_ahead(learning_rate, hold=hold)

    def commit(self, learning_rate: float, *, used: bytes = b"", again: bool = False, replaced: bool = False) -> None:
        """End the step, all buckets having been pushed: blocks until the new parameters are in the arena.

        Args:
            used: a byte for each slot, not zero if backward reached it; empty: it reached all.
            again: nothing was pushed; use the average that ended the step before.
            replaced: the arena's parameters were changed since the last step: go on from rank 0's.
        """
        self._check_process()
        self._steps.commit(learning_rate, used=used, again=again, replaced=replaced)

    def average(self) -> None:
        """End the step, all buckets having been pushed, without an update: blocks until the mean gradients are in the
        arena."""
        self._check_process()
        self._steps.average()

    def pull(self) -> None:
        """Between steps, not in sync mode: blocks until the servers' present parameters are in the arena."""
        self._check_process()
        self._steps.pull()

    def refuse(self, error: GradSyncError) -> GradSyncError:
        """Fail the group with an error of this trainer's. What to raise: where several refuse at once, all are told the
        same, the first that came to server 0."""
        self._check_process()
        because = Failure(kind=type(error).__name__, message=str(error))
        self._steps.take_nothing_more()
        self._servers.sessions[0].send([TrainerMessage(goodbye=Goodbye(epoch=self.epoch, because=because))])
        self._servers.soon(lambda: False, FAREWELL_S)
        return self._servers.error or error

    def check(self) -> None:
        """Does not block.

        Raises:
            GradSyncError: the group has failed.
        """
        self._servers.check()

    def configure(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        """Name the optimizer of later updates, and each slot as its state's keys do ("": it is no parameter)."""
        self._check_process()
        self._optimizer_state.configure(self._layout, optimizer, names)

    def keep(self, updates: int, step: int) -> None:
        """Have servers keep the optimizer's state after each update from now on; before `configure`.

        Args:
            updates, step: how many there have been, and after which step the trainers go on; in a group that comes
                after another one, servers go on after so many updates.
        """
        self._check_process()
        self._optimizer_state.keep(updates, step)

    def optimizer_state(self) -> dict[str, npt.NDArray[Any]]:
        """What the servers' optimizers keep, by Paddle's keys, with the slots' names; needs no other trainer."""
        self._check_process()
        return self._optimizer_state.gather()

    def load_optimizer_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Have the servers' optimizers go on from a state as `optimizer_state` gives it. Rank 0's counts.

        Raises:
            UsageError: it belongs to other parameters.
        """
        self._check_process()
        self._optimizer_state.load(state)

    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Every trainer's `values` (equal shape and dtype), stacked in rank order; not within a step."""
        self._check_process()
        return self._gathers.all_gather(values)

    def ask_servers(self, *, events: bool = False) -> list[ServerAnswer]:
        """See TracedServers."""
        self._check_process()
        return [session.ask(events=events, timeout=self.timeout) for session in self._servers.sessions]

    def forget(self) -> None:
        """In a forked child, whose open connections would hide from the servers that the trainer died."""
        self._planes.hang_up()
        rpc.let_go(self.servers)

    def close(self, reason: str = "") -> None:
        """Leave the group, of the first model with all others; idempotent. In a forked child it does nothing."""
        if os.getpid() != self._process:
            return
        reach("leaving", 0)
        first = self._first
        errors = [client._servers.error for client in (first, *first._further)]
        heard = next(filter(None, errors), None) if reason else None
        for each in (*self._further, self):
            each._leave(reason, heard)
        if self in first._further:
            first._further.remove(self)
        self._further.clear()

    def _leave(self, reason: str, heard: GradSyncError | None) -> None:
        """Say goodbye, and which failure was heard of in whichever model."""
        goodbye = TrainerMessage(goodbye=Goodbye(epoch=self.epoch, reason=reason))
        if heard:
            goodbye.goodbye.because.kind, goodbye.goodbye.because.message = type(heard).__name__, str(heard)
        self._planes.part()
        self._servers.close(goodbye)
        self._channels.close()
        self._planes.close()
        self._steps.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close("" if kind is None else f"{kind.__name__}: {error}")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(f"the client is that of process {self._process}, from which this one was forked")
