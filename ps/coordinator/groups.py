"""The models of one server: each has a group of its own of the same trainers, which begins and ends by itself.

Model 0 is there from the start, and with its group ends the training. Who has a seat in it may ask for further models.
What fails one group fails all: a trainer that is lost is lost to each.
"""

from __future__ import annotations

import gc
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

from common.commit.kept_parts import KeptParts
from common.errors import GradSyncError, ProtocolError, UsageError
from common.network.gradsync_pb2 import Hello, JoinRequest
from common.sync.trace import Recorder
from common.system.memory import SegmentPool
from common.system.process import restarts
from ps.coordinator.coordinator import Coordinator
from ps.planes.data_port import DataPort

__all__ = ["MOST_MODELS", "Group", "Groups"]

MOST_MODELS = 64  # at a time: each has threads and sockets of its own


class Group:
    """One model's trainers: their seats, their coordinator, and the memory that they share.

    Args:
        tokens: by which ranks take their seats.
    """

    def __init__(self, number: int, coordinator: Coordinator, pool: SegmentPool, tokens: list[bytes]) -> None:
        self.number, self.coordinator = number, coordinator
        self._pool, self._tokens = pool, tokens
        self.sessions = 0  # that are open

    def token(self, rank: int) -> bytes:
        return self._tokens[rank]

    def has_seat(self, rank: int, token: bytes) -> bool:
        """Whether the rank was given this token."""
        return rank < len(self._tokens) and secrets.compare_digest(token, self._tokens[rank])

    def close(self, until: float = 0.0) -> None:
        """Give all memory back, when nobody is heard any longer; `until`: see Coordinator.close."""
        self.coordinator.close(until)
        self._pool.close()


class Groups:
    """Thread-safe.

    Args:
        shard: (index, count) of this server.
        timeout, wait_limit: see Coordinator.
        port: where trainers open data connections; without one none does.
        checkpoint_dir, memory: of what is kept of the first model.
    """

    def __init__(
        self,
        nranks: int,
        *,
        shard: tuple[int, int],
        timeout: float,
        wait_limit: float,
        port: DataPort | None,
        checkpoint_dir: Path | None = None,
        memory: KeptParts | None = None,
    ) -> None:
        self._checkpoint_dir, self._memory = checkpoint_dir, memory
        self._nranks, self._shard, self._port = nranks, shard, port
        self._helper = ThreadPoolExecutor(1, "gradsync-helper")
        self._recorder = cache(partial(Recorder, "server", shard[0]))  # one for all
        self._lock = threading.Lock()
        self._has_failed = threading.Lock()  # held from the first failure on
        self._count = 0  # of the models that there have been
        self._stopping = False
        self._further: dict[int, Group] = {}
        self.first = self._make(timeout, wait_limit, None)

    def __len__(self) -> int:
        return 1 + len(self._further)

    def _make(self, timeout: float, wait_limit: float, first: Coordinator | None) -> Group:
        number, self._count = self._count, self._count + 1
        tokens = [secrets.token_bytes(16) for _ in range(self._nranks)]
        pool = SegmentPool()
        coordinator = Coordinator(
            self._nranks,
            shard=self._shard,
            timeout=timeout,
            wait_limit=wait_limit,
            epoch=restarts(),
            pool=pool,
            port=self._port.more(number * self._nranks, tokens) if self._port else None,
            helper=self._helper,
            recorder=self._recorder,
            first=first,
            checkpoint_dir=None if first else self._checkpoint_dir,
            memory=None if first else self._memory,
        )
        coordinator.at_failure(self._spread)
        return Group(number, coordinator, pool, tokens)

    def join(self, request: JoinRequest) -> Group:
        """The group of a further model, which begins with the first trainer that asks for it.

        Raises:
            ProtocolError: who asks has no seat in the first group, or it is another model's turn.
            UsageError: there are too many.
            GradSyncError: what the group has failed with.
        """
        rank, number, first = request.rank, request.model, self.first.coordinator
        if not self.first.has_seat(rank, request.seat):
            raise ProtocolError(f"rank {rank} joined for model {number} without the token it was given for model 0")
        with self._lock:
            if first.over:
                raise first.failure or ProtocolError(
                    f"rank {rank} joined for model {number} when the training was over"
                )
            if group := self._further.get(number):
                return group
            if number != self._count:
                raise ProtocolError(f"rank {rank} joined for model {number}, but the next one is {self._count}")
            if len(self) == MOST_MODELS:
                raise UsageError(
                    f"servers keep the parameters of at most {MOST_MODELS} models at a time; close one that is not "
                    "needed any longer before another one is made"
                )
            patience = first.silence.patience
            group = self._further[number] = self._make(patience.timeout, patience.wait_limit, first)
            for gone in first.gone:
                group.coordinator.without(gone)
            if failure := first.failure:  # meanwhile, and it may not have seen this one
                group.coordinator.fail(failure)
            return group

    def group_of(self, hello: Hello) -> Group:
        """Where the trainer has its seat, which shows the token that its rank was given.

        Raises:
            ProtocolError: it has none.
        """
        with self._lock:
            group = self._further.get(hello.model) if hello.model else self.first
        if group is None or not group.has_seat(hello.rank, hello.token):
            raise ProtocolError(f"rank {hello.rank} came without the token that the rank was given when it joined")
        return group

    def entered(self, group: Group) -> None:
        """A session has begun."""
        with self._lock:
            group.sessions += 1

    def left(self, group: Group, rank: int) -> None:
        """A session has ended: with its last one a further model is dropped."""
        with self._lock:
            group.sessions -= 1
            over = group.coordinator.over and not group.coordinator.failure
            dropped = self._further.pop(group.number, None) if over and not group.sessions else None
            ended = group is self.first and not group.coordinator.failure
            others = list(self._further.values()) if ended else []
        for other in others:
            other.coordinator.without(rank)
        if dropped:
            dropped.close()
            del dropped, group
            gc.collect()  # Paddle's optimizers hold themselves, and with them the shard

    def fail(self, error: GradSyncError) -> None:
        """All of them."""
        first = self.first.coordinator
        first.fail(error)
        with self._lock:
            further = list(self._further.values())
        for group in further:
            group.coordinator.fail(first.failure or error)

    def stop(self, error: GradSyncError, timeout: float) -> None:
        """Fail with this error once no step is half done, of any model; each may take `timeout`."""
        self._stopping = True
        with self._lock:
            further = list(self._further.values())
        for group in further:
            group.coordinator.stop_after_step(error)
        for group in further:
            group.coordinator.wait_until_over(timeout)
        self.first.coordinator.stop_after_step(error)

    def close(self, until: float = 0.0) -> None:
        """Likewise, of all."""
        self._helper.shutdown()
        with self._lock:
            further, self._further = list(self._further.values()), {}
        for group in (*further, self.first):
            group.close(until)
        if self._port:
            self._port.close()

    def _spread(self, error: GradSyncError) -> None:
        """A group has failed, whose lock is held; those that are being stopped fail by themselves."""
        if self._stopping or not self._has_failed.acquire(blocking=False):
            return
        if self._further:
            threading.Thread(target=self.fail, args=(error,), name="gradsync-failure", daemon=True).start()
