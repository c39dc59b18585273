"""What a data plane is, at both ends: how gradients travel to a server, and results to its trainers.

    shm    shm_trainer.py, shm_server.py    processes of one host read and write one another's memory
    tcp    tcp_plane.py                     in frames of a TCP connection beside the session
    grpc   grpc_plane.py                    in the messages of the session

A further plane is a pair of such classes and its name here. ps/client/data_planes.py chooses at the trainer's end, and
ps/coordinator/data_planes.py at the server's; nobody else asks which plane it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Protocol

from common.network.gradsync_pb2 import Chunk, Place, Plane, Served, ServerMessage, TrainerMessage
from common.sync.trace import Trace
from common.tensors.arena import FloatArray
from ps.planes.wire_format import Outgoing
from ps.store.store import Result

__all__ = ["DATA_PLANES", "ServerPlane", "Stream", "TrainerPlane"]

DATA_PLANES = ("auto", "shm", "tcp", "grpc")


class Stream(Protocol):
    """A trainer's session with a server, by which `post` sends over gRPC."""

    @property
    def unanswered(self) -> bool:
        """Whether the server may not have heard yet what was sent last."""

    def post(self, messages: Iterable[TrainerMessage | Outgoing]) -> None: ...


class TrainerPlane(ABC):
    """Between a trainer and one server, as the trainer sees it."""

    name: str
    tells_results = False  # whether the end of a step is told by `hear`, not over gRPC
    can_hold = False  # whether results can be kept back until the trainer has committed

    @abstractmethod
    def gradients_in(self, array: FloatArray) -> None:
        """The gradients, of the whole arena, are in this array from now on.

        Raises:
            Unreachable: the server has gone.
        """

    @abstractmethod
    def push(self, words: Chunk, trace: Trace) -> None:
        """Send words of the gradients, which `words` names. Does not block; they must stay as they are until the step
        has ended."""

    @abstractmethod
    def note(self, message: TrainerMessage) -> None:
        """Send a small message, which overtakes nothing that was sent before."""

    @abstractmethod
    def say(self, messages: Iterable[TrainerMessage | Outgoing]) -> None:
        """Send what is not of a step, likewise."""

    def welcome(self) -> None:  # noqa: B027 - only some need to know
        """Results that were kept back are taken from now on."""

    def hear(self, seconds: float) -> ServerMessage | None:  # noqa: ARG002 - by default there is none
        """The next small message that does not come over gRPC; None if none came within `seconds`."""
        return None

    @abstractmethod
    def fetch(self, out: FloatArray, served: Served, *, averages: bool) -> None:
        """A step has ended: its parameters or averages are in `out`, of the whole arena, when this returns.

        Raises:
            Unreachable: the server's memory cannot be read.
        """


class ServerPlane(ABC):
    """Between a server and one trainer, as the server sees it."""

    name: str
    sent = 0  # bytes of results

    @abstractmethod
    def terms(self) -> Plane:
        """What the trainer is told of it before the first parameters."""

    @abstractmethod
    def gradients(self, place: Place, length: int) -> FloatArray:
        """The whole arena's gradients, where the trainer has them.

        Raises:
            Unreachable: they cannot be read.
        """

    @abstractmethod
    def deliver(self, result: Result) -> None:
        """Hand a result out, and tell the trainer if it is complete."""

    def open(self) -> None:  # noqa: B027 - only some have other ways
        """The trainer has been told the terms: other ways than gRPC may be used from now on."""

    def notes(self) -> Iterator[TrainerMessage]:
        """What the trainer has said otherwise than over gRPC, once."""
        return iter(())
