"""Messages from one rank to another, beside the training: what sub-groups, `send` and `recv` are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["ALONE", "Messenger"]


class Messenger(ABC):
    """One rank's end. Messages of one sender to one receiver on one channel arrive in order, whole, and once.

    Used by one thread at a time, and not within a step of a synchronizer of the same group.

    Raises (every method):
        PeerLost, PeerStalled: the other rank died, or gives no sign of life; it is named.
        ValueError: there is no such other rank.
    """

    rank: int
    nranks: int

    @abstractmethod
    def send(self, to: int, channel: int, data: bytes | bytearray | memoryview) -> None:
        """Hand `data` (bytes, perhaps none) over for rank `to`, another one; when this returns it may be changed.

        Does not wait for that rank to ask for it, but for room on the way there.

        Args:
            channel: 0..2^32-1; what is sent on one is not received on another.
        """

    @abstractmethod
    def receive(self, source: int, channel: int) -> bytearray:
        """The next message of rank `source`, another one, on this channel; blocks until it is there."""

    @abstractmethod
    def comes(self, source: int, channel: int, seconds: float) -> bool:
        """Whether that message is there within so many seconds, a few at most."""


class Alone(Messenger):
    """The end of a rank that has nobody to talk to."""

    rank, nranks = 0, 1

    def send(self, to: int, channel: int, data: bytes | bytearray | memoryview) -> None:  # noqa: ARG002
        raise ValueError(f"there is no other rank (got to={to})")

    def receive(self, source: int, channel: int) -> bytearray:  # noqa: ARG002
        raise ValueError(f"there is no other rank (got source={source})")

    def comes(self, source: int, channel: int, seconds: float) -> bool:  # noqa: ARG002
        raise ValueError(f"there is no other rank (got source={source})")


ALONE = Alone()
