"""What launchers of several hosts tell each other while they replace ranks: JSON, over their streams (lobby.py).

another host -> the first    Report    of its ranks, whenever something has changed
the first -> another host    Order     what to do with them
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Struct

from common.launch.child import ProcessFailed
from common.network.message_stream import MessageStream
from common.system.next_epoch import Word

__all__ = ["Failure", "Order", "RankReport", "Report", "orders_in", "reports_in", "send"]


T = TypeVar("T", "Report", "Order")


class RankReport(Struct, frozen=True):
    """Args:
    begun: the epoch in which it was started.
    code: how it has ended; None: it lives.
    keeps: whether it has kept a step boundary.
    notes: of `Child.told`.
    """

    name: str
    begun: int
    code: int | None
    frozen: bool
    keeps: bool
    notes: str


class Failure(Struct, frozen=True):
    """Of a host's ranks, as `ProcessFailed` has it."""

    cause: str
    exit_code: int
    joined: bool
    by_signal: bool

    @classmethod
    def of(cls, failure: ProcessFailed) -> Failure:
        return cls(failure.cause, failure.exit_code, failure.joined, failure.by_signal)

    def error(self, since: float | None) -> ProcessFailed:
        """
        Args:
            since: when this host knew of it, monotonic seconds.
        """
        return ProcessFailed(self.cause, self.exit_code, since=since, joined=self.joined, by_signal=self.by_signal)


class Report(Struct, frozen=True):
    """Args:
    life: the epoch in which the launchers met last.
    gave_up: all are to be started again.
    """

    life: int
    ranks: list[RankReport] = []
    failure: Failure | None = None
    gave_up: bool = False


class Order(Struct, frozen=True):
    """Args:
    life: see Report.
    kill: ranks that have stalled.
    end: ranks in whose places others come in this epoch, because of `failure`; on all hosts.
    meet: the launchers meet in that epoch, since another has come, or is to come, in the place of one that is gone.
    start: ranks to be started, which meet the others at `place`.
    word: for ranks that live.
    went_on: after which step all go on, and how many are made again.
    over: all ranks, of all hosts, have ended well.
    """

    life: int
    kill: list[str] = []
    end: list[str] = []
    epoch: int = 0
    failure: Failure | None = None
    meet: bool = False
    start: list[str] = []
    place: str = ""
    word: Word | None = None
    went_on: tuple[int, int] | None = None
    over: bool = False
    gave_up: bool = False


ENCODER = msgspec.json.Encoder()
REPORTS, ORDERS = msgspec.json.Decoder(Report), msgspec.json.Decoder(Order)


def send(stream: MessageStream, message: Report | Order) -> None:
    stream.send(ENCODER.encode(message))


def reports_in(stream: MessageStream, life: int) -> list[Report]:
    """That have come, of this life of the job; what cannot be read ends the stream."""
    return [report for report in _decoded(REPORTS, stream) if report.life == life]


def orders_in(stream: MessageStream, life: int) -> list[Order]:
    """Likewise."""
    return [order for order in _decoded(ORDERS, stream) if order.life == life]


def _decoded(decoder: msgspec.json.Decoder[T], stream: MessageStream) -> list[T]:
    try:
        return [decoder.decode(message) for message in stream.take()]
    except msgspec.DecodeError as exc:
        stream.end(f"{stream.peer} sent what cannot be read: {exc}")
        return []
