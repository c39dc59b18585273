"""Messages between trainers: passed on at once, in the order in which they come, and never kept."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from common.errors import PeerLost, ProtocolError
from common.network.gradsync_pb2 import Awaiting, Parcel, ServerMessage, Taken
from common.network.patience import Patience
from common.network.rpc import CHUNK_BYTES
from ps.coordinator.frozen_or_slow import Silence
from ps.coordinator.liveness import Lives, Members, ServerQueue
from ps.planes.parcels import ROOM_BYTES, cost_of

__all__ = ["Relay"]


class Relay:
    """Every method is called with `lock` held.

    Args:
        patience: of the trainers that wait for another one's message, or for room.
        lives, stuck, clock: see Silence.
    """

    def __init__(
        self,
        members: Members,
        lock: threading.Condition,
        patience: Patience,
        lives: Lives,
        *,
        stuck: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members, self._lock, self._lives, self._clock = members, lock, lives, clock
        self._patience, self._stuck = patience, stuck
        self._silence: Silence | None = None  # once somebody waits
        self._on_the_way: Counter[tuple[int, int]] = Counter()  # bytes, by sender and receiver
        self._passed_on: Counter[tuple[int, int]] = Counter()  # parcels, likewise
        self._early: dict[int, list[ServerMessage]] = {}  # for those who have not come yet
        self._waits: dict[int, Awaiting] = {}

    def welcome(self, rank: int, queue: ServerQueue) -> None:
        """A trainer has come."""
        queue.put(self._early.pop(rank, []))

    def pass_on(self, rank: int, parcel: Parcel) -> None:
        """A piece of a message of this trainer; lost where the receiver has finished."""
        members, to, cost = self._members, parcel.rank, cost_of(parcel)
        members.check_epoch(parcel.epoch, rank)
        if to >= members.nranks or to == rank or len(parcel.data) > CHUNK_BYTES:
            raise ProtocolError(f"rank {rank} sent a parcel of {len(parcel.data):,} bytes to rank {to}")
        if to in members.gone:
            self._give_room(rank, to, cost)
            return
        if parcel.number != (expected := self._passed_on[rank, to]):
            raise ProtocolError(f"rank {rank} sent parcel {parcel.number} to rank {to}, expected {expected}")
        if sum(self._on_the_way[rank, other] for other in range(members.nranks)) + cost > ROOM_BYTES:
            raise ProtocolError(f"rank {rank} sent more parcels than there is room for ({ROOM_BYTES:,} bytes)")
        self._on_the_way[rank, to] += cost
        self._passed_on[rank, to] += 1
        parcel.rank = rank
        message = ServerMessage(parcel=parcel)
        if to in members.queues:
            members.queues[to].put([message])
        else:
            self._early.setdefault(to, []).append(message)
        if self._silence:
            self._silence.still_alive()

    def taken(self, rank: int, taken: Taken) -> None:
        """A trainer has room for more."""
        self._members.check_epoch(taken.epoch, rank)
        if taken.bytes > self._on_the_way[taken.rank, rank]:
            raise ProtocolError(f"rank {rank} took {taken.bytes:,} bytes of rank {taken.rank} that were not sent")
        self._on_the_way[taken.rank, rank] -= taken.bytes
        self._give_room(taken.rank, rank, taken.bytes)
        if self._silence:
            self._silence.still_alive()

    def awaiting(self, rank: int, awaiting: Awaiting) -> None:
        """A trainer has waited for a moment already, or waits no longer."""
        self._members.check_epoch(awaiting.epoch, rank)
        if awaiting.rank >= self._members.nranks:
            raise ProtocolError(f"rank {rank} waits for rank {awaiting.rank}")
        if awaiting.over:
            self._waits.pop(rank, None)
        else:
            self._waits[rank] = awaiting
        self._note_who_waits()
        self._miss(awaiting.rank)

    def waiting(self) -> set[int]:
        """The trainers that wait for a message which is not on its way."""
        return {who for who, awaiting in self._waits.items() if self._is_due(who, awaiting)}

    def _is_due(self, who: int, awaiting: Awaiting) -> bool:
        return not awaiting.room and awaiting.parcels == self._passed_on[awaiting.rank, who]

    def left(self, rank: int) -> None:
        """A trainer has finished: what is on its way to it is lost, and nobody need wait for that."""
        self._waits.pop(rank, None)
        for sender in range(self._members.nranks):
            if lost := self._on_the_way.pop((sender, rank), 0):
                self._give_room(sender, rank, lost)
        self._note_who_waits()
        self._miss(rank)

    def _miss(self, rank: int) -> None:
        """Fail if this trainer has finished and another one, to which nothing is on its way, waits for its message."""
        if rank not in self._members.gone:
            return
        for who, awaiting in self._waits.items():
            if awaiting.rank == rank and self._is_due(who, awaiting):
                self._members.fail(PeerLost(f"rank {rank} finished while rank {who} waits for a message of it"))
                return

    def _give_room(self, sender: int, receiver: int, nbytes: int) -> None:
        if queue := self._members.queues.get(sender):
            taken = Taken(epoch=self._members.epoch, rank=receiver, bytes=nbytes)
            queue.put([ServerMessage(taken=taken)])

    def _note_who_waits(self) -> None:
        if self._waits:
            self._watch().someone_waits()
        elif self._silence:
            self._silence.nobody_waits()

    def _watch(self) -> Silence:
        if self._silence is None:
            self._silence = Silence(
                self._members,
                self._lock,
                Patience(self._patience.timeout, self._patience.wait_limit),
                lambda: sorted({awaiting.rank for awaiting in self._waits.values()}),
                lambda: sorted(self._waits),
                self._lives,
                stuck=self._stuck,
                steps=False,
                clock=self._clock,
            )
        return self._silence
