"""Before the first step: trainers register alike, and rank 0 sends its parameters, which become everybody's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from common.errors import LayoutMismatch, ProtocolError
from common.network.gradsync_pb2 import Chunk, Register
from common.sync.trace import NO_TRACE, Recorder, Trace
from common.system.memory import aligned_empty
from common.tensors.arena import FloatArray, Layout
from ps.coordinator.checks import check_layout, check_memory, check_sizes
from ps.coordinator.commits import ServerCommits
from ps.coordinator.data_planes import DataPlanes
from ps.coordinator.frozen_or_slow import Silence
from ps.coordinator.liveness import Members
from ps.planes.protobuf_messages import data_of, layout_of, optimizer_of
from ps.store.make import make_store
from ps.store.modes import SYNC, parse_mode
from ps.store.shards import plan_shards
from ps.store.store import Store

__all__ = ["Registration"]


class Registration:
    """What trainers agree on.

    Args:
        shard: (index, count) of this server.
        empty: makes the arrays that trainers may read.
        helper: a thread that shares the work on large arrays.
        recorder: makes what records, if a trainer asks for that.
        commits: keep the shard's part.
    """

    def __init__(
        self,
        members: Members,
        silence: Silence,
        planes: DataPlanes,
        *,
        shard: tuple[int, int],
        recorder: Callable[[], Recorder],
        empty: Callable[[int], FloatArray] = aligned_empty,
        helper: ThreadPoolExecutor | None = None,
        commits: ServerCommits,
    ) -> None:
        self._commits = commits
        self._members, self._silence, self._planes = members, silence, planes
        self._shard, self._empty, self._helper, self._recorder = shard, empty, helper, recorder
        self._first: Register | None = None
        self._registered: set[int] = set()
        self._filled = 0  # words of rank 0's parameters that have arrived
        self._mode = SYNC
        self.store: Store | None = None
        self.begun = False  # all have registered, and have been handed out rank 0's parameters
        self.trace: Trace = NO_TRACE

    @property
    def awaited(self) -> bool:
        """Whether some have registered, and wait for the others to."""
        return bool(self._registered) and not self.begun

    @property
    def agreed(self) -> Register:
        """What the first trainer has registered, and so all."""
        assert self._first is not None
        return self._first

    def layout(self) -> Layout:
        return layout_of(self.agreed)[0]

    def store_for(self, rank: int) -> Store:
        """
        Raises:
            ProtocolError: the trainer sends data before there is a store.
        """
        if self.store is None:
            raise ProtocolError(f"rank {rank} sent data before registering")
        return self.store

    def register(self, rank: int, register: Register) -> None:
        """A trainer tells what it is going to train; with the last one training begins.

        Raises:
            LayoutMismatch: it is not what the others train.
        """
        members = self._members
        if rank in self._registered:
            raise ProtocolError(f"rank {rank} sent an unexpected register message at step {members.steps}")
        members.check_epoch(register.epoch, rank)
        check_sizes(register, rank)
        self._compare(rank, register)
        if self.store is None:
            self.store = self._make_store(rank, register)
        if register.trace and not self.trace.active:
            self.trace = self.store.trace = self._recorder()
        self._planes.choose(rank, register, self._mode, self.store, members.queues[rank])
        self._registered.add(rank)
        self._commits.plan(rank, register)
        self._silence.someone_waits()
        self._begin_if_ready(self.store)
        if members.gone and self._silence.somebody_waits:
            members.miss_those_gone()

    def take_parameters(self, rank: int, chunk: Chunk, words: FloatArray | None) -> None:
        """The next piece of rank 0's; with the last one training may begin."""
        store = self.store_for(rank)
        self._members.check_epoch(chunk.epoch, rank)
        data = data_of(chunk) if words is None else words
        expected = store.shard.start + self._filled
        if rank != 0 or not data.size or chunk.start != expected or self._filled + data.size > store.shard.length:
            raise ProtocolError(f"rank {rank} sent parameters from word {chunk.start}, expected {expected} from rank 0")
        store.parameters[self._filled : self._filled + data.size] = data
        self._filled += data.size
        self._silence.still_alive()
        self._begin_if_ready(store)

    def close(self) -> None:
        """Give the memory back: what is left of the group may stay until Python finds its cycles."""
        self.store, self._empty = None, aligned_empty

    def missing(self) -> list[int]:
        """Whom the others wait for, before training begins."""
        if len(self._registered) < self._members.nranks:
            return self._members.absent_from(self._registered)
        return [] if self.begun else [0]

    def _compare(self, rank: int, register: Register) -> None:
        """All trainers must be about to do the same."""
        if self._first is None:
            check_layout(register, rank)
            self._first = register
            return
        (mine, my_buckets), (theirs, their_buckets) = layout_of(self._first), layout_of(register)
        difference = mine.difference(theirs)
        if difference is None and my_buckets != their_buckets:
            difference = f"bucket plan of {len(my_buckets)} against one of {len(their_buckets)} buckets"
        if difference is None and self._first.optimizer != register.optimizer:
            difference = f"{optimizer_of(self._first)} against {optimizer_of(register)}"
        if difference is None and self._first.mode != register.mode:
            difference = f"--mode {self._first.mode or SYNC} against {register.mode or SYNC}"
        if difference is None and self._first.commit_every != register.commit_every:
            difference = f"--commit-every {self._first.commit_every} against {register.commit_every}"
        if difference:
            raise LayoutMismatch(
                f"rank {self._first.rank} and rank {register.rank} disagree: {difference}; "
                "give all trainers the same model and flags"
            )

    def _make_store(self, rank: int, register: Register) -> Store:
        self._mode = parse_mode(register.mode or str(SYNC))
        if self._mode != SYNC and not register.HasField("optimizer"):
            raise ProtocolError(f"rank {rank} registered for mode {self._mode} without an optimizer")
        layout, buckets = layout_of(register)
        index, count = self._shard
        shard = plan_shards(layout.length, count)[index]
        check_memory(rank, register, self._mode, shard, self._members.nranks)
        return make_store(
            self._mode,
            shard,
            buckets,
            self._members.nranks,
            epoch=self._members.epoch,
            sent=register.connected,
            near=self._planes.near,
            empty=self._empty,
            helper=self._helper,
        )

    def _begin_if_ready(self, store: Store) -> None:
        """Once rank 0's parameters are complete and all have registered, all get them."""
        if len(self._registered) < self._members.nranks or self._filled < store.shard.length:
            return
        results = store.begin(optimizer_of(self.agreed))
        self._commits.begin(store)
        self._planes.settle(self._mode, store)
        for result in results:
            self._planes.deliver(result)
        self.begun = True
        self._silence.nobody_waits()
