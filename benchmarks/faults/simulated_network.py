"""The ring's network in the simulation: links that keep their order, each as late as it likes, and groups that meet.

Where messages go wrong:

    doubled     it comes twice
    overtaken   it comes before the one that was sent before it
    old         before it comes one that an earlier epoch had sent, with the same step, bucket and place

All of these are refused, or a promise is broken; nothing else is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from benchmarks.faults.simulated import PromiseBroken, Story
from benchmarks.faults.turns import Actor, Turns
from collective.call_tags import Array, Tag
from collective.transports.base import Transport
from common.errors import (
    GradSyncError,
    LayoutMismatch,
    NonFiniteGradient,
    PeerLost,
    PeerStalled,
    ProtocolError,
    RendezvousError,
    StaleEpoch,
    error_from_name,
)
from common.system.process import note_joined, note_joining, restarts

__all__ = ["TIMEOUT_S", "WAYS", "Network", "SimulatedTransport"]

WAYS = ("doubled", "overtaken", "old")
TIMEOUT_S = 5.0
FOLLOWED = tuple(kind.__name__ for kind in (PeerLost, PeerStalled, LayoutMismatch, NonFiniteGradient))
PIECES = (128, 256, 1024, 1024)  # bytes


@dataclass
class Message:
    """
    Args:
        wrong: of WAYS; "": it comes as it should.
    """

    number: int
    tag: Tag
    data: Array
    arrives: float
    wrong: str = ""


class Ring:
    """Of the ranks that meet at one place; complete when all have come.

    Attributes:
        members: those that have come, or, once it is complete, all.
    """

    def __init__(self, network: Network, nranks: int, number: int) -> None:
        self.network, self.nranks, self.number = network, nranks, number
        self.members: dict[int, SimulatedTransport] = {}
        self.is_complete = False
        self.failure: GradSyncError | None = None
        self.links: dict[tuple[int, int], deque[Message]] = {
            (a, b): deque() for a in range(nranks) for b in range(nranks)
        }

    def meet(self, mine: SimulatedTransport) -> None:
        """Blocks until all have come.

        Raises:
            RendezvousError: they have not in time.
        """
        turns = self.network.turns
        if mine.rank in self.members:
            self.failure = self.failure or RendezvousError(f"rank {mine.rank} joined twice")
        self.members[mine.rank] = mine
        self.is_complete = self.is_complete or len(self.members) == self.nranks
        deadline = turns.now + TIMEOUT_S
        for other in self.members.values() if self.is_complete else ():
            if other is not mine:
                turns.wake(other.process, turns.now + self.network.late())
        while not (self.is_complete or self.failure):
            if turns.now >= deadline:
                missing = [str(rank) for rank in range(self.nranks) if rank not in self.members]
                self.failure = RendezvousError(
                    f"{len(self.members)} of {self.nranks} ranks joined within {TIMEOUT_S:g} s; "
                    f"missing: rank {', '.join(missing)}"
                )
                for other in self.members.values():
                    turns.wake(other.process, turns.now)
                break
            turns.wake_next(mine.process, deadline)
            turns.wait(mine.process)
        if self.failure:
            raise self.failure

    def lose(self, rank: int, error: GradSyncError | None) -> None:
        """It has left because of that, or has done all that it had to; the others hear of it."""
        if not self.is_complete:
            self.members.pop(rank, None)
            return
        turns = self.network.turns
        for other in self.members.values():
            if other.rank != rank:
                turns.at(turns.now + self.network.late(), partial(other.hear, rank, error))


class SimulatedTransport(Transport):
    """Checks tags as that between threads does (collective/transports/threads.py)."""

    def __init__(self, ring: Ring, process: Actor, rank: int, nranks: int, piece_bytes: int) -> None:
        self.ring, self.process = ring, process
        self.rank, self.nranks, self.piece_bytes = rank, nranks, piece_bytes
        self._network, self._turns = ring.network, ring.network.turns
        self._failure: GradSyncError | None = None
        self._finished: set[int] = set()
        self._source: deque[Message] | None = None  # the link on which it waits
        self.is_closed = False

    def send(self, rank: int, array: Array, tag: Tag) -> None:
        self.process.moment("sends")
        link = self.ring.links[self.rank, rank]
        was_empty = not link
        self._network.put(link, (self.rank, rank), tag, array)
        receiver = self.ring.members[rank]
        if was_empty and receiver._source is link:
            self._turns.wake(receiver.process, link[0].arrives)

    def receive(self, rank: int, out: Array, tag: Tag) -> None:
        self.process.moment("receives")
        link = self.ring.links[rank, self.rank]
        while not (link and link[0].arrives <= self._turns.now):
            if self._failure:
                raise self._failure
            if not link and rank in self._finished:
                raise PeerLost(f"rank {rank} finished while rank {self.rank} still needed it")
            self._source = link
            if link:
                self._turns.wake_next(self.process, link[0].arrives)
            self._turns.wait(self.process)
            self._source = None
        got = link.popleft()
        self._network.check(got, tag, rank, self.rank)
        if got.data.nbytes != out.nbytes:
            raise PromiseBroken(f"rank {rank} sent {got.data.nbytes} bytes, where {out.nbytes} were expected: {tag}")
        np.copyto(out, got.data)

    def flush(self) -> None:
        """What was sent was copied."""

    def close(self, reason: str = "") -> None:
        if self.is_closed or self.process.is_killed:
            return
        self.is_closed = True
        self.ring.lose(self.rank, failure_of(self.rank, reason))

    def die(self) -> None:
        """Its process has: the kernel closes what it had."""
        if not self.is_closed:
            self.is_closed = True
            self.ring.lose(self.rank, PeerLost(f"rank {self.rank} died: its connection closed without a goodbye"))

    def stall(self) -> None:
        """The others have missed it for too long."""
        if self.ring.is_complete:
            self.ring.lose(self.rank, PeerStalled(f"rank {self.rank} did not take part for {TIMEOUT_S:g} s"))

    def hear(self, rank: int, error: GradSyncError | None) -> None:
        """That this rank has left so."""
        if error is None:
            self._finished.add(rank)
        self._failure = self._failure or error
        if self._source is not None:
            self._turns.wake(self.process, self._turns.now)


def failure_of(rank: int, reason: str) -> GradSyncError | None:
    """What it is to the others that a rank left with that reason; None: nothing."""
    kind, _, text = reason.partition(": ")
    if not kind:
        return None
    return error_from_name(kind, text) if kind in FOLLOWED else PeerLost(f"rank {rank} left with {reason}")


class Network:
    """
    Args:
        wrong: what is to go wrong with messages, each at the first one from that number on with which it can.

    Attributes:
        refused: messages that were, by what had gone wrong.
        hurt_at: when that was last.
    """

    def __init__(self, turns: Turns, story: Story, wrong: list[tuple[int, str]]) -> None:
        self.turns, self.story = turns, story
        self._wrong = sorted(wrong)
        self._piece_bytes = story.rng.choice(PIECES)
        self._numbers, self._rings = count(), dict[str, Ring]()
        self._sent: dict[tuple[tuple[int, int], Tag], Message] = {}  # with an epoch of 0, if old ones are to come
        self._keeps_old = any(way == "old" for _, way in wrong)
        self._taken: set[int] = set()
        self.refused = dict.fromkeys(WAYS, 0)
        self.hurt_at = -1.0

    def late(self) -> float:
        """How long something is under way."""
        return self.story.rng.expovariate(100.0)

    def join(self, process: Actor, rank: int, nranks: int, place: str) -> SimulatedTransport:
        """Blocks until the group that meets at that place is complete."""
        process.moment("joins")
        note_joining(nranks)
        ring = self._rings.setdefault(place, Ring(self, nranks, len(self._rings)))
        self.tell(f"rank {rank} joins group {ring.number} in epoch {restarts()}")
        process.moment("meets")
        transport = SimulatedTransport(ring, process, rank, nranks, self._piece_bytes)
        ring.meet(transport)
        note_joined()
        process.moment("has met")
        return transport

    def tell(self, line: str) -> None:
        self.story.tell(self.turns.now, line)

    def of(self, process: Actor) -> list[SimulatedTransport]:
        """Its connections that are open."""
        members = [each for ring in self._rings.values() for each in ring.members.values()]
        return [each for each in members if each.process is process and not each.is_closed]

    def put(self, link: deque[Message], ends: tuple[int, int], tag: Tag, array: Array) -> None:
        """Behind what is under way there, if nothing goes wrong with it."""
        arrives = self.turns.now + self.late()
        if link:
            arrives = max(arrives, link[-1].arrives)
        message = Message(next(self._numbers), tag, array.copy(), arrives)
        link.append(message)
        if self._wrong and message.number >= self._wrong[0][0]:
            self._spoil(link, ends, message)
        if self._keeps_old:
            self._sent.setdefault((ends, tag._replace(epoch=0)), message)

    def _spoil(self, link: deque[Message], ends: tuple[int, int], message: Message) -> None:
        """Do the next thing, if it can be done with this message."""
        way = self._wrong[0][1]
        if way == "doubled":
            link.append(Message(message.number, message.tag, message.data, message.arrives, way))
        elif way == "overtaken" and len(link) > 1:
            link[-2], link[-1] = link[-1], link[-2]
            link[-2].arrives, link[-1].arrives = link[-1].arrives, link[-2].arrives
            message.wrong = way
        elif way == "old" and (old := self._sent.get((ends, message.tag._replace(epoch=0)))):
            if old.tag.epoch == message.tag.epoch:
                return
            link.insert(len(link) - 1, Message(old.number, old.tag, old.data, message.arrives, way))
        else:
            return
        del self._wrong[0]
        self.tell(f"{way}: {message.number} from rank {ends[0]} to rank {ends[1]}, {message.tag}")

    def check(self, got: Message, expected: Tag, sender: int, receiver: int) -> None:
        """
        Raises:
            StaleEpoch, ProtocolError: it is not what is expected.
        """
        what = f"rank {receiver}: {got.number} of rank {sender}, {tuple(got.tag)}"
        try:
            expected.check(got.tag, sender)
        except ProtocolError as exc:
            self.tell(f"refused by {what}: {type(exc).__name__}")
            if not got.wrong:
                raise PromiseBroken(f"refused although nothing is wrong with it: {what}: {exc}") from exc
            if isinstance(exc, StaleEpoch) != (got.wrong == "old"):
                raise PromiseBroken(f"refused for another reason than its epoch: {what}: {exc}") from exc
            self.refused[got.wrong] += 1
            self.hurt_at = self.turns.now
            raise
        self.tell(f"taken by {what}")
        if got.wrong or got.number in self._taken:
            raise PromiseBroken(f"taken although it was {got.wrong or 'taken before'}: {what}")
        self._taken.add(got.number)
