"""All-gather between trainers: each one's bytes, joined in rank order and sent to all."""

from __future__ import annotations

from common.errors import ProtocolError
from common.network.gradsync_pb2 import Gather, ServerMessage
from ps.coordinator.checks import check_gather
from ps.coordinator.frozen_or_slow import Silence
from ps.coordinator.liveness import Members
from ps.planes.protobuf_messages import pieces

__all__ = ["Gathering"]


class Gathering:
    """One after the other, counted by all trainers alike."""

    def __init__(self, members: Members, silence: Silence) -> None:
        self._members, self._silence = members, silence
        self._count = 0
        self._parts: dict[int, bytearray] = {}  # what each trainer has sent of the one under way
        self.complete: set[int] = set()  # whose part is whole

    def take(self, rank: int, gather: Gather) -> None:
        """A piece of one trainer's part; the last one of all ends the gather."""
        members = self._members
        members.check_epoch(gather.epoch, rank)
        begun = self._parts.setdefault(rank, bytearray())
        if gather.sequence != self._count or rank in self.complete:
            raise ProtocolError(f"rank {rank} called gather number {gather.sequence} out of turn")
        check_gather(gather, rank, len(begun), members.nranks)
        begun += gather.data
        self._silence.still_alive()
        if len(begun) < gather.size:
            return
        self.complete.add(rank)
        self._silence.someone_waits()
        if len(self.complete) == members.nranks:
            self._answer()
        elif members.gone:
            members.miss_those_gone()

    def _answer(self) -> None:
        data = b"".join(self._parts[rank] for rank in range(self._members.nranks))
        for queue in self._members.queues.values():
            answer = pieces(data, epoch=self._members.epoch, sequence=self._count)
            queue.put(ServerMessage(gathered=piece) for piece in answer)
        self._parts.clear()
        self.complete.clear()
        self._count += 1
        self._silence.nobody_waits()

    def tell_at_work(self) -> None:
        """Those who have sent their part wait for as long as others still train; see Gather."""
        for rank in self.complete:
            at_work = Gather(epoch=self._members.epoch, sequence=self._count, size=1)
            self._members.queues[rank].put([ServerMessage(gathered=at_work)])
