"""Copies of what ranks have alone (boundaries.py), each with a rank of the next host, so that a lost host does not take
them with it:

    what rank r has alone   lies in rank r's memory, that of its launcher, and that of rank r + EACH, of N

where each host has EACH ranks. They are sent after each step. So when one rank has ended the next step, all have the
copies of this one: whoever is lost left one of a boundary that all others have.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.commit.kept_parts import COPIES_VARIABLE, HOLDS
from common.sync.synchronizer import Synchronizer
from common.system.process import note

if TYPE_CHECKING:
    from common.commit.parts import Buffer

__all__ = ["MOST", "Copies", "copies_here"]

CHANNEL = 0  # of messages
STEP = struct.Struct("<q")  # before what a message holds
MOST_BYTES = 1 << 20  # of a rank; more would hold up every step, and is not sent
MOST = 2  # boundaries that a rank keeps


class Copies:
    """Those that this rank holds of one of the host before.

    Args:
        each: how many ranks each host has; fewer than the group.
    """

    def __init__(self, synchronizer: Synchronizer, each: int) -> None:
        self._synchronizer, self._each = synchronizer, each
        self._held: dict[int, bytes] = {}  # by steps
        self._told = False

    def holder_of(self, rank: int) -> int:
        return (rank + self._each) % self._synchronizer.nranks

    @property
    def steps(self) -> list[int]:
        """Of which this rank holds one, in order."""
        return sorted(self._held)

    def exchange(self, step: int, content: Sequence[Buffer]) -> None:
        """Send what this rank has alone after so many steps, if anything, and take in the other's; called by all ranks.

        Raises:
            PeerLost, PeerStalled: one of the two.
        """
        mine, group = b"", self._synchronizer
        if content and sum(map(len, content)) <= MOST_BYTES:
            mine = b"".join([STEP.pack(step), *content])
        to, source = self.holder_of(group.rank), (group.rank - self._each) % group.nranks
        group.messenger.send(to, CHANNEL, mine)  # so little that it need not be received for that
        theirs = group.messenger.receive(source, CHANNEL)
        if theirs:
            if not self._told:
                self._told = True
                note(f"{HOLDS} {source}")
            self._held[STEP.unpack_from(theirs)[0]] = bytes(theirs[STEP.size :])
        for old in self.steps[:-MOST]:
            del self._held[old]

    def hand_back(self, step: int, ranks: Sequence[int]) -> bytes:
        """Of these ranks, who have nothing, each gets what it had after that step; called by all ranks.

        Returns:
            This rank's, if it is one of them.
        """
        group, mine = self._synchronizer, b""
        for rank in ranks:
            if self.holder_of(rank) == group.rank:
                group.messenger.send(rank, CHANNEL, self._held[step])
            elif rank == group.rank:
                mine = bytes(group.messenger.receive(self.holder_of(rank), CHANNEL))
        self._held = {kept: content for kept, content in self._held.items() if kept <= step}
        return mine


def copies_here(synchronizer: Synchronizer) -> Copies | None:
    """This process's; None where there are none."""
    each = int(os.environ.get(COPIES_VARIABLE) or 0)
    return Copies(synchronizer, each) if 0 < each < synchronizer.nranks else None
