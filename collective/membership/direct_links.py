"""Connections between ranks of a large group that usually have none, each opened by who first has a message for the
other; it carries what its opener sends, and ends with the group."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.network.door import Door

__all__ = ["DirectLinks"]


@dataclass(frozen=True)
class DirectLinks:
    """How a rank has them.

    Args:
        door: where others open theirs.
        seats: the rank of each seat at that door.
        open: opens one to that rank, within so many seconds; raises PeerUnreachable or Unreachable.
        close: the door and what belongs to it.
    """

    door: Door
    seats: Mapping[int, int]
    open: Callable[[int, float], socket.socket]
    close: Callable[[], None]

    def arrived(self) -> list[tuple[int, socket.socket]]:
        """What others have opened since the last call, each with its opener's rank."""
        return [(self.seats[seat], connection) for seat, connection in self.door.take_all(self.seats)]

    def forget(self) -> None:
        """In a forked child: nobody comes in here."""
        self.door.forget()
