"""Steps: what trainers push and commit goes to the store, and what comes out of it is handed out."""

from __future__ import annotations

import time

from common.errors import GradSyncError, ProtocolError
from common.network.gradsync_pb2 import Chunk, Commit, Place, Pull
from common.system.fault_points import reach
from common.system.memory import Unreachable
from common.tensors.arena import FloatArray
from ps.coordinator.checks import check_used
from ps.coordinator.commits import ServerCommits
from ps.coordinator.data_planes import DataPlanes
from ps.coordinator.frozen_or_slow import Silence
from ps.coordinator.gathering import Gathering
from ps.coordinator.liveness import Members
from ps.coordinator.optimizer_messages import ProgramOptimizer
from ps.coordinator.pace import Pace
from ps.coordinator.registration import Registration
from ps.planes.protobuf_messages import data_of
from ps.store.ending import Ending
from ps.store.store import Progress, Store

__all__ = ["Stepping"]


class Stepping:
    """From the first gradients to the last result."""

    def __init__(
        self,
        members: Members,
        silence: Silence,
        planes: DataPlanes,
        registration: Registration,
        gathering: Gathering,
        pace: Pace,
        commits: ServerCommits,
        program: ProgramOptimizer,
    ) -> None:
        self._commits, self._program = commits, program
        self._members, self._silence, self._planes = members, silence, planes
        self._registration, self._gathering, self._pace = registration, gathering, pace
        self._stop: GradSyncError | None = None  # to fail with when the step is complete

    def read_in_place(self, rank: int, place: Place) -> None:
        """A trainer tells where its gradients lie, all of the arena's."""
        store = self._registration.store_for(rank)
        try:
            whole = self._planes.gradients(rank, place, self._registration.agreed.length)
        except Unreachable as exc:
            raise ProtocolError(
                f"the gradients of rank {rank} cannot be read at step {self._members.steps}: {exc}"
            ) from exc
        store.read_in_place(rank, whole[store.shard.start : store.shard.stop])

    def push(self, rank: int, chunk: Chunk, words: FloatArray | None) -> None:
        """Gradients of a trainer, or where they are to be read."""
        reach("got-push", chunk.step)
        store = self._registration.store_for(rank)
        data = words if words is not None else chunk.size or data_of(chunk)
        self._pace.pushed[rank] += 4 * (data if isinstance(data, int) else data.size)
        progress = store.push(rank, chunk.epoch, chunk.step, chunk.bucket, chunk.start, data)
        reach("stored", chunk.step)
        self._silence.still_alive()
        self._go_on(rank, store, progress, chunk.step)

    def commit(self, rank: int, commit: Commit) -> None:
        """A trainer tells how its step ends."""
        reach("got-commit", commit.step)
        store = self._registration.store_for(rank)
        check_used(commit.used, rank, len(self._registration.agreed.slots))
        ending = Ending(commit.learning_rate, commit.update, commit.replaced, commit.again)
        progress = store.commit(rank, commit.epoch, commit.step, ending, commit.used, ahead=commit.ahead)
        self._go_on(rank, store, progress, commit.step, counted=commit.again)
        self._gathering.tell_at_work()

    def pull(self, rank: int, pull: Pull) -> None:
        """A trainer wants the parameters as they are now."""
        self._planes.deliver(self._registration.store_for(rank).pull(rank, pull.epoch, pull.step))

    def stop_after_step(self, error: GradSyncError) -> None:
        """Fail with this error as soon as no step is half committed."""
        self._stop = error
        store = self._registration.store
        if store and store.within_step():
            self._silence.someone_waits()
        else:
            self._members.fail(error)

    def _go_on(self, rank: int, store: Store, progress: Progress, step: int, *, counted: bool = False) -> None:
        """Hand out what there is now; the others wait, or nobody does any longer.

        Args:
            counted: it was, as the trainer's step, when it ended with the average that is used again now.
        """
        members = self._members
        members.steps = min(store.steps)
        if progress.finished and not counted:
            self._pace.committed(rank, time.monotonic())
        self._commits.before_results(members.steps, store)
        self._program.before_results(store)
        for result in progress.results:
            reach("before-reply", step)
            self._planes.deliver(result)
            if result.complete:
                members.served.update(dict.fromkeys(result.ranks, result.step))
            reach("replied", step)
        self._commits.after(members.steps, store)
        if progress.finished:
            self._note_who_waits(store)
            if self._stop and not store.within_step():
                members.fail(self._stop)
        if members.gone and store.misses(members.gone):
            members.miss_those_gone()

    def _note_who_waits(self, store: Store) -> None:
        if self._gathering.complete or store.waiting():
            self._silence.someone_waits()
            self._silence.still_alive()
        else:
            self._silence.nobody_waits()
