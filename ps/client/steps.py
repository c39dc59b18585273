"""A trainer's steps: gradients go to the servers, a commit says how the step ends, and the result comes back."""

from __future__ import annotations

import numpy as np

from common.network.gradsync_pb2 import Chunk, Commit, Pull, TrainerMessage
from common.sync.trace import NO_TRACE, Trace
from common.system.fault_points import reach
from common.tensors.arena import Arena, FloatArray
from ps.client.servers import Servers
from ps.planes.wire_format import frames
from ps.store.shards import shard_of_bucket

__all__ = ["Steps"]


class Steps:
    """One after the other, once `begin` was called."""

    def __init__(self, servers: Servers, rank: int, epoch: int) -> None:
        self._servers, self._rank, self._epoch = servers, rank, epoch
        self.step = 0
        self.gradients: FloatArray = np.empty(0, np.float32)  # what is pushed, or after `average`, the mean
        self.trace: Trace = NO_TRACE
        self._told_of_gradients = False
        self._updates = False  # whether steps end with updates in sync mode, so that they can be committed ahead
        self._ahead: Commit | None = None  # how the step under way was committed ahead

    def begin(self, arena: Arena, *, updates: bool) -> None:
        """All planes are known, and parameters are rank 0's."""
        self._arena, self.gradients, self._updates = arena, arena.gradients, updates

    def close(self) -> None:
        """Let go of the arena, which may go before the client does."""
        self.__dict__.pop("_arena", None)
        self.gradients = np.empty(0, np.float32)

    def gradients_in(self, array: FloatArray) -> None:
        """Push from this array from now on."""
        if array.ctypes.data != self.gradients.ctypes.data:
            self.gradients, self._told_of_gradients = array, False

    def push(self, bucket: int) -> None:
        """See Client.push."""
        reach("before-push", self.step)
        where = self._arena.buckets[bucket]
        if not self._told_of_gradients:
            self._told_of_gradients = True
            with self._servers.within_reach():
                for session in self._servers.sessions:
                    session.plane.gradients_in(self.gradients)
        for session in self._servers.sessions:
            part = shard_of_bucket(session.shard, where)
            if part.length:
                words = Chunk(epoch=self._epoch, step=self.step, bucket=bucket, start=part.start, size=part.length)
                session.plane.push(words, self.trace)
        reach("pushed", self.step)

    def commit_ahead(self, learning_rate: float, *, hold: bool) -> None:
        """See Client.commit_ahead."""
        can_hold = all(session.plane.can_hold for session in self._servers.sessions)
        if self._ahead is not None or not self._updates or (hold and not can_hold):
            return
        self._ahead = Commit(update=True, learning_rate=learning_rate)
        if hold:
            for session in self._servers.sessions:
                session.inbox.hold()
        self._send(Commit(update=True, learning_rate=learning_rate, ahead=True), self._arena.parameters)

    def commit(self, learning_rate: float, *, used: bytes, again: bool, replaced: bool) -> None:
        """See Client.commit."""
        if replaced:
            self.send_parameters(self._arena)
        commit = Commit(update=True, learning_rate=learning_rate, used=used, again=again, replaced=replaced)
        self._end(commit, self._arena.parameters)

    def take_nothing_more(self) -> None:
        """The step under way will not end: what still comes of it is dropped."""
        nowhere = np.empty_like(self._arena.parameters)
        for session in self._servers.sessions:
            session.inbox.expect(nowhere)
            session.welcome()

    def average(self) -> None:
        """See Client.average."""
        self._end(Commit(), self.gradients)

    def pull(self) -> None:
        """See Client.pull."""
        parameters = self._arena.parameters
        for session in self._servers.sessions:
            session.inbox.expect(parameters, version=self.step - 1)
            session.plane.note(TrainerMessage(pull=Pull(epoch=self._epoch, step=self.step)))
        self._servers.wait_for_step(self.step, "waiting for the parameters")
        self.fetch(parameters)

    def send_parameters(self, arena: Arena) -> None:
        """Rank 0's parameters are everybody's."""
        if self._rank != 0:
            return
        for session in self._servers.sessions:
            shard, label = session.shard, {"epoch": self._epoch, "step": self.step}
            mine = arena.parameters[shard.start : shard.stop].copy()
            session.send(frames(TrainerMessage, "parameters", mine, first=shard.start, **label))

    def fetch(self, out: FloatArray, *, averages: bool = False) -> None:
        """What the servers have said is there comes into `out`, of the arena's length, if it is not there yet."""
        with self._servers.within_reach():
            for session in self._servers.sessions:
                session.plane.fetch(out, session.inbox.served, averages=averages)

    def _send(self, commit: Commit, target: FloatArray) -> None:
        """Tell all servers how the step ends; what they answer is written to `target`."""
        message = TrainerMessage(commit=commit)
        message.commit.epoch, message.commit.step = self._epoch, self.step
        for session in self._servers.sessions:
            session.inbox.expect(target)
            session.plane.note(message)

    def _end(self, commit: Commit, target: FloatArray) -> None:
        reach("before-commit", self.step)
        if self._ahead is None:
            self._send(commit, target)
        elif commit != self._ahead:
            raise ValueError(
                f"step {self.step} was committed ahead as an update at learning rate {self._ahead.learning_rate:g}; "
                "it cannot end in another way"
            )
        self._ahead = None
        for session in self._servers.sessions:
            session.welcome()
        reach("committed", self.step)
        self._servers.wait_for_step(self.step + 1, f"waiting for the result of step {self.step}")
        reach("received", self.step)
        self.step += 1
        self.fetch(target, averages=not commit.update)
        self.trace.moment("received")
