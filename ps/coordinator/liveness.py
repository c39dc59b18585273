"""Who is alive: who has come, who has left, who has died, and what the group failed with.

A dead trainer's connection is closed by the kernel, and its stream, or before that the call by which it has joined,
ends without a goodbye: Members.lose. One whose connection stays up, but who sends nothing: frozen_or_slow.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from common.errors import GradSyncError, PeerLost, ProtocolError, StaleEpoch, error_from_name
from common.network.gradsync_pb2 import Alive, Failure, Goodbye, Hello, ServerMessage
from common.network.patience import ALIKE
from ps.planes.send_queue import SendQueue
from ps.planes.wire_format import Outgoing

__all__ = ["Lives", "Members", "ServerQueue", "tell"]

ServerQueue = SendQueue[ServerMessage | Outgoing]  # of the messages to one trainer


def tell(queue: ServerQueue, error: GradSyncError, served: int = 0) -> None:
    """The last message of a session that failed; that step's result was sent before."""
    queue.put([ServerMessage(failure=Failure(kind=type(error).__name__, message=str(error), served=served))])
    queue.end()


class Lives:
    """The signs of life of a server's trainers. They are of its processes, whatever these are waited for in.

    Args:
        queues: of the sessions by which a trainer is asked that has no other one yet.
    """

    def __init__(self, queues: Mapping[int, ServerQueue]) -> None:
        self._queues = queues
        self.heard: dict[int, float] = {}  # when each trainer gave its last one
        self.hosts: dict[int, str] = {}  # where each is; not there or "": on this host

    def ask(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if queue := self._queues.get(rank):
                queue.put([ServerMessage(alive=Alive())])


class Members:
    """Every method is called with `lock` held. The first error fails the group: every trainer is told.

    Args:
        lock: is notified when the training is over.
    """

    def __init__(self, nranks: int, epoch: int, lock: threading.Condition) -> None:
        self.nranks, self.epoch = nranks, epoch
        self.steps = 0  # that have ended
        self.served: dict[int, int] = {}  # the last step, as the store counts, whose result each rank was sent
        self.queues: dict[int, ServerQueue] = {}  # of those who have come
        self.gone: set[int] = set()
        self.failure: GradSyncError | None = None
        self.over = False
        self._lock = lock
        self._at_end: list[Callable[[], None]] = []

    @property
    def complete(self) -> bool:
        """Whether all have come."""
        return len(self.queues) == self.nranks

    def enter(self, hello: Hello, queue: ServerQueue) -> int:
        """A trainer has come; its rank."""
        self.check_epoch(hello.epoch, hello.rank)
        if hello.rank in self.queues or hello.rank >= self.nranks:
            raise ProtocolError(f"rank {hello.rank} came twice or is outside 0..{self.nranks - 1}")
        self.queues[hello.rank] = queue
        if self.failure:
            tell(queue, self.failure)
        return hello.rank

    def check_epoch(self, epoch: int, rank: int) -> None:
        """
        Raises:
            StaleEpoch: the trainer's message belongs to another incarnation of the group.
        """
        if epoch != self.epoch:
            raise StaleEpoch(f"rank {rank} sent a message of epoch {epoch}, this is epoch {self.epoch}")

    def absent_from(self, ranks: Iterable[int]) -> list[int]:
        """The ranks that are not among these."""
        present = set(ranks)
        return [rank for rank in range(self.nranks) if rank not in present]

    def leave(self, rank: int, goodbye: Goodbye, *, missed: bool) -> None:
        """A trainer says that it leaves; `missed`: others wait for it."""
        self.gone.add(rank)
        self.check_epoch(goodbye.epoch, rank)
        if goodbye.HasField("because"):
            self.fail(error_from_name(goodbye.because.kind, goodbye.because.message))
        elif goodbye.reason:
            self.fail(PeerLost(f"rank {rank} left at step {self.steps} with {goodbye.reason}"))
        else:
            self.queues[rank].end()
            if len(self.gone) == self.nranks:
                self._end()
            elif missed:
                self.miss_those_gone()

    def never_comes(self, rank: int, *, missed: bool) -> None:
        """A trainer that has not come has left for good; `missed`: others wait for it."""
        if self.over or rank in self.queues:
            return
        self.gone.add(rank)
        if missed:
            self.miss_those_gone()
        elif len(self.gone) == self.nranks:
            self._end()

    def lose(self, rank: int, step: int) -> None:
        """A trainer's stream ended at its step of that number."""
        if rank not in self.gone:
            self.fail(PeerLost(f"rank {rank} died at step {step}: its connection closed without a goodbye"))

    def miss_those_gone(self) -> None:
        """Others cannot go on without the trainers that have left."""
        left = ", ".join(str(rank) for rank in sorted(self.gone))
        self.fail(PeerLost(f"rank {left} finished at step {self.steps} while others go on; {ALIKE}"))

    def fail(self, error: GradSyncError) -> None:
        """The training ends with this error, if it is not over."""
        if self.over:
            return
        self.failure = error
        for rank, queue in self.queues.items():
            tell(queue, error, self.served.get(rank, 0))
        self._end()

    def at_end(self, call: Callable[[], None]) -> None:
        """Call this when the training is over."""
        self._at_end.append(call)

    def _end(self) -> None:
        self.over = True
        self._lock.notify_all()
        for call in self._at_end:
            call()
