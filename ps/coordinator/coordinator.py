"""One model's trainers at one server: hears their messages in any order, one at a time, and has each part do its own.

liveness       who has come, who has left or died, what the group failed with
silence        who is connected but does not take part any longer
registration   what all agree on before the first step
data_planes    how gradients and results travel
stepping       gradients in, results out; the state itself is in ps/store
program        the optimizer of a user's program, and what is kept of it
gathering      all-gather
commits        its part of what is kept of the training
relay          messages from one trainer to another, at server 0 for its first model
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from common.commit.kept_parts import KeptParts
from common.errors import GradSyncError, ProtocolError
from common.network.gradsync_pb2 import StatusReply, TrainerMessage
from common.network.patience import WAIT_LIMIT_S, Patience
from common.sync.trace import Recorder, Trace
from common.system.memory import SegmentPool, aligned_empty
from common.tensors.arena import FloatArray
from ps.coordinator.commits import ServerCommits
from ps.coordinator.data_planes import DataPlanes
from ps.coordinator.frozen_or_slow import WATCH_S, Silence
from ps.coordinator.gathering import Gathering
from ps.coordinator.liveness import Lives, Members, ServerQueue
from ps.coordinator.optimizer_messages import ProgramOptimizer
from ps.coordinator.pace import Pace
from ps.coordinator.program_boundaries import ProgramBoundaries
from ps.coordinator.registration import Registration
from ps.coordinator.relay import Relay
from ps.coordinator.stepping import Stepping
from ps.planes.data_port import Seats

__all__ = ["Coordinator"]

OWN_CLOCK_S = 0.5  # before the server a trainer may find that its time has run out
Handler = Callable[[int, TrainerMessage, FloatArray | None], None]


class Coordinator:
    """Thread-safe. The first error fails the group: every trainer is told, `wait` raises it, nothing else happens.

    Args:
        shard: (index, count) of this server.
        timeout, wait_limit: how long, in seconds, trainers may wait for one that gives no sign of life, or does.
        pool: makes the arrays that trainers of this host and user read; without one none does.
        port: where trainers open data connections; without one none does.
        helper: a thread that shares the work on large arrays.
        recorder: makes what records, if a trainer asks for that.
        first: of the same trainers' first model, if this is a further one.
        clock: by which they wait, in seconds.
        checkpoint_dir: where the shard's part of commits is kept; without one none is.
        memory: where the shard's step boundaries are; likewise.
    """

    def __init__(
        self,
        nranks: int,
        *,
        shard: tuple[int, int] = (0, 1),
        timeout: float = 30.0,
        wait_limit: float = WAIT_LIMIT_S,
        epoch: int = 0,
        pool: SegmentPool | None = None,
        port: Seats | None = None,
        helper: ThreadPoolExecutor | None = None,
        recorder: Callable[[], Recorder] | None = None,
        first: Coordinator | None = None,
        clock: Callable[[], float] = time.monotonic,
        checkpoint_dir: Path | None = None,
        memory: KeptParts | None = None,
    ) -> None:
        self.nranks, self.shard = nranks, shard
        self._lock = threading.Condition()
        self._pace = Pace(nranks)
        self._members = Members(nranks, epoch, self._lock)
        self._planes = DataPlanes(nranks, epoch, pool, port, self.handle, self.ended)
        self._members.at_end(self._planes.wake)
        patience = Patience(timeout, wait_limit)
        self.lives: Lives = first.lives if first else Lives(self._members.queues)
        self.silence = Silence(
            *(self._members, self._lock, patience, self._missing, self._waiting, self.lives),
            stuck=self._all_wait,
            speaks=shard[0] == 0,
            clock=clock,
        )
        relays = shard[0] == 0 and first is None
        shared = (self._members, self._lock, patience, self.lives)
        self._relay = Relay(*shared, stuck=self._all_wait, clock=clock) if relays else None
        self._commits = ServerCommits(checkpoint_dir, shard[0], self.fail, memory)
        self._gathering = Gathering(self._members, self.silence)
        self._registration = Registration(
            self._members,
            self.silence,
            self._planes,
            shard=shard,
            recorder=recorder or (lambda: Recorder("server", shard[0])),
            empty=pool.empty if pool else aligned_empty,
            helper=helper,
            commits=self._commits,
        )
        kept = ProgramBoundaries(memory, shard[0])
        self._program = ProgramOptimizer(self._members, self.silence, self._registration, kept)
        self._stepping = Stepping(
            self._members,
            self.silence,
            self._planes,
            self._registration,
            self._gathering,
            self._pace,
            self._commits,
            self._program,
        )
        self._handlers = self._make_handlers()

    def _make_handlers(self) -> dict[str | None, Handler]:
        handlers: dict[str | None, Handler] = {
            "register": lambda rank, message, _: self._register(rank, message),
            "parameters": self._take_parameters,
            "gradients": lambda rank, message, words: self._stepping.push(rank, message.gradients, words),
            "gradients_at": lambda rank, message, _: self._stepping.read_in_place(rank, message.gradients_at),
            "commit": lambda rank, message, _: self._commit(rank, message),
            "pull": lambda rank, message, _: self._stepping.pull(rank, message.pull),
            "gather": lambda rank, message, _: self._gathering.take(rank, message.gather),
            "configure": lambda rank, message, _: self._program.configure(rank, message.configure),
            "keep": lambda rank, message, _: self._program.keep(rank, message.keep),
            "state": lambda rank, message, _: self._program.load_state(rank, message.state),
            "state_request": lambda rank, message, _: self._program.send_state(rank, message.state_request),
            "alive": lambda rank, _, __: self.silence.heard(rank),
            "goodbye": lambda rank, message, _: self._leave(rank, message),
        }
        if relay := self._relay:
            handlers["parcel"] = lambda rank, message, _: relay.pass_on(rank, message.parcel)
            handlers["taken"] = lambda rank, message, _: relay.taken(rank, message.taken)
            handlers["awaiting"] = lambda rank, message, _: relay.awaiting(rank, message.awaiting)
        return handlers

    @property
    def steps(self) -> int:
        """How many steps have been applied."""
        return self._members.steps

    @property
    def trace(self) -> Trace:
        """What has been recorded, if a trainer asked for that."""
        return self._registration.trace

    @property
    def desk(self) -> str:
        """Where trainers of this host and user hand in their memory; "": nowhere."""
        return self._planes.desk

    @property
    def data_port(self) -> int:
        """Where trainers open data connections; 0: nowhere."""
        return self._planes.data_port

    def expect(self, timeout: float) -> None:
        """All trainers have joined, and are about to enter; from now on they may wait so long for one another."""
        with self._lock:
            self.silence.patience.timeout = timeout
            if not self._members.complete:
                self.silence.someone_waits()

    def wait_for_hello(self, rank: int, call: grpc.ServicerContext) -> bool:
        """Block until a trainer that has joined enters, or the training is over, or the call ends by which it has
        joined, and which it holds open; whether it has entered."""
        with self._lock:
            while call.is_active() and not (rank in self._members.queues or self._members.over):
                self._lock.wait(WATCH_S)
            return rank in self._members.queues

    def joining_ended(self, rank: int, call: grpc.ServicerContext) -> None:
        """That call has: a trainer that has not entered by now has died. If its time has run out, it may be slow; its
        own clock may have said so a little earlier."""
        with self._lock:
            left = call.time_remaining()
            if rank not in self._members.queues and (left is None or left > OWN_CLOCK_S):
                self._members.lose(rank, 0)

    def enter(self, message: TrainerMessage, queue: ServerQueue) -> int:
        """A trainer's first message; returns its rank."""
        if message.WhichOneof("kind") != "hello":
            raise ProtocolError("a trainer did not say hello before it sent anything else")
        with self._lock:
            rank = self._members.enter(message.hello, queue)
            self._lock.notify_all()
            if self._members.complete and not (self._registration.awaited or self._gathering.complete):
                self.silence.nobody_waits()
            if self._relay:
                self._relay.welcome(rank, queue)
            return rank

    def without(self, rank: int) -> None:
        """A trainer has finished, whether or not it has ever come here."""
        with self._lock:
            self._members.never_comes(rank, missed=self._is_waited_for(rank))

    def handle(self, rank: int, message: TrainerMessage, words: FloatArray | None = None) -> None:
        """Any later message of a trainer, perhaps with the words of its chunk apart. Raises what `fail` is then to be
        called with."""
        with self._lock:
            self._take_notes(rank)  # it left them before it sent this
            self._handle(rank, message, words)

    def lost(self, rank: int) -> None:
        """A trainer's stream ended."""
        with self._lock:
            store = self._registration.store
            self._members.lose(rank, store.steps[rank] if store else self.steps)

    def ended(self, rank: int, error: Exception | None) -> None:
        """A trainer's session or data connection ended, perhaps for an error of its or, if it is none of ours, here."""
        if isinstance(error, GradSyncError):
            self.fail(error)
        elif error is not None:
            self.fail(GradSyncError(f"the server failed: {type(error).__name__}: {error}"))
        self.lost(rank)

    def fail(self, error: GradSyncError) -> None:
        with self._lock:
            self._members.fail(error)

    def at_failure(self, call: Callable[[GradSyncError], None]) -> None:
        """Call this with what the group fails with, if it does, at once: while its lock is held."""

        def at_end() -> None:
            if error := self._members.failure:
                call(error)

        self._members.at_end(at_end)

    @property
    def failure(self) -> GradSyncError | None:
        """What it failed with, if it did."""
        with self._lock:
            return self._members.failure

    @property
    def over(self) -> bool:
        """Whether all trainers have finished, or it has failed."""
        with self._lock:
            return self._members.over

    @property
    def gone(self) -> set[int]:
        """The trainers that have finished."""
        with self._lock:
            return set(self._members.gone)

    def stop_after_step(self, error: GradSyncError) -> None:
        """Fail with this error as soon as no step is half committed; that one may take `timeout`."""
        with self._lock:
            self._stepping.stop_after_step(error)

    def wait(self) -> None:
        """Block until training is over; raises the group's failure, if it failed. Trainings have no time limit."""
        with self._lock:
            self._lock.wait_for(lambda: self._members.over)
            if self._members.failure:
                raise self._members.failure

    def wait_until_over(self, timeout: float) -> None:
        """Likewise, without a word of how it ended; at most so many seconds."""
        with self._lock:
            self._lock.wait_for(lambda: self._members.over, timeout)

    def close(self, until: float = 0.0) -> None:
        """Give all memory back, when nobody is heard any longer, whoever still refers to this group.

        Args:
            until: results are still sent, until then at most; monotonic, in seconds.
        """
        with self._lock:
            self._registration.close()
        self._commits.close()
        self._planes.close(until)

    def status(self) -> StatusReply:
        """How the training goes."""
        with self._lock:
            members, store = self._members, self._registration.store
            training = "training" if self._registration.begun else "waiting for trainers"
            state = str(members.failure) if members.failure else "complete" if members.over else training
            index, count = self.shard
            reply = StatusReply(shard=index, shards=count, nranks=self.nranks, steps=members.steps, state=state)
            reply.parameters, reply.restarts = store.shard.length if store else 0, members.epoch
            waiting = store.waiting() if store else ()
            for rank in sorted(members.queues):
                reply.trainers.add(
                    rank=rank,
                    data_plane=self._planes.name(rank),
                    steps=self._pace.steps[rank],
                    times_last=self._pace.times_last[rank],
                    lag=self._pace.lag(rank),
                    bytes_pushed=self._pace.pushed[rank],
                    bytes_served=self._planes.sent(rank),
                    left=rank in members.gone,
                    waiting=rank in waiting,
                )
            return reply

    def straggler(self) -> str:
        """Which trainer the others waited for most often, in words; "" if there is no telling."""
        with self._lock:
            return self._pace.straggler()

    def _handle(self, rank: int, message: TrainerMessage, words: FloatArray | None = None) -> None:
        if self._members.failure:
            return
        kind = message.WhichOneof("kind")
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"rank {rank} sent an unexpected {kind} message at step {self.steps}")
        handler(rank, message, words)

    def _take_notes(self, rank: int) -> None:
        for note in self._planes.notes(rank):
            self._handle(rank, note)

    def _hear_notes(self) -> None:
        """Some trainer has left one."""
        try:
            with self._lock:
                for rank in range(self.nranks):
                    self._take_notes(rank)
        except GradSyncError as exc:
            self.fail(exc)
        except Exception as exc:
            self.fail(GradSyncError(f"the server failed: {type(exc).__name__}: {exc}"))
            raise

    def _register(self, rank: int, message: TrainerMessage) -> None:
        self._registration.register(rank, message.register)
        self._listen_if_begun()

    def _take_parameters(self, rank: int, message: TrainerMessage, words: FloatArray | None) -> None:
        if self._program.named:
            self._program.replace_parameters(rank, message.parameters, words)
        else:
            self._registration.take_parameters(rank, message.parameters, words)
            self._listen_if_begun()

    def _listen_if_begun(self) -> None:
        """All trainers have been told where to leave notes."""
        if self._registration.begun:
            self._planes.listen(self._hear_notes, lambda: self._members.over)

    def _commit(self, rank: int, message: TrainerMessage) -> None:
        self._registration.store_for(rank)
        if message.commit.update:
            self._program.check_named(rank, message.commit.step)
        self._stepping.commit(rank, message.commit)

    def _leave(self, rank: int, message: TrainerMessage) -> None:
        self._members.leave(rank, message.goodbye, missed=self._is_waited_for(rank))
        if self._relay and not self._members.over:
            self._relay.left(rank)

    def _is_waited_for(self, rank: int) -> bool:
        return self.silence.somebody_waits and rank in self._missing()

    def _waiting(self) -> list[int]:
        """Who waits for others."""
        store = self._registration.store
        if self._registration.begun and not self._gathering.complete and store:
            return sorted(store.waiting())
        return self._members.absent_from({*self._missing(), *self._members.gone})

    def _all_wait(self) -> bool:
        """Whether each trainer waits for another one, so that nothing more will come."""
        store, waiting = self._registration.store, set(self._gathering.complete)
        if store and self._registration.begun:
            waiting |= store.waiting()
        if self._relay:
            waiting |= self._relay.waiting()
        return len(waiting) == self.nranks

    def _missing(self) -> list[int]:
        """Whom the others wait for."""
        store = self._registration.store
        if not self._members.complete:
            return self._members.absent_from(self._members.queues)
        if self._gathering.complete:
            return self._members.absent_from(self._gathering.complete)
        return store.waiting_for() if store and self._registration.begun else self._registration.missing()
