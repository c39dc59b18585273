"""The plane between hosts: gradients and results travel in the messages of the session."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from common.network.gradsync_pb2 import Chunk, Place, Plane, Served, ServerMessage, TrainerMessage
from common.sync.trace import Trace
from common.system.memory import Unreachable
from common.tensors.arena import FloatArray
from ps.planes.plane import ServerPlane, Stream, TrainerPlane
from ps.planes.send_queue import SendQueue
from ps.planes.wire_format import Outgoing, frames
from ps.store.store import Result

__all__ = ["GrpcServerPlane", "GrpcTrainerPlane"]


class GrpcTrainerPlane(TrainerPlane):
    """Results are written to the arena as they come."""

    name = "grpc"
    can_hold = True

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._gradients: FloatArray = np.empty(0, np.float32)

    def gradients_in(self, array: FloatArray) -> None:
        self._gradients = array

    def push(self, words: Chunk, trace: Trace) -> None:
        array = self._gradients[words.start : words.start + words.size]
        label = {"epoch": words.epoch, "step": words.step, "bucket": words.bucket}
        messages = frames(TrainerMessage, "gradients", array, first=words.start, **label)
        self._stream.post(trace.sending(messages, words.bucket))

    def note(self, message: TrainerMessage) -> None:
        self._stream.post([message])

    def say(self, messages: Iterable[TrainerMessage | Outgoing]) -> None:
        self._stream.post(messages)

    def fetch(self, out: FloatArray, served: Served, *, averages: bool) -> None:
        """Everything is there."""


class GrpcServerPlane(ServerPlane):
    """
    Args:
        queue: of the messages to the trainer.
        why_not: why memory is not shared, in words.
    """

    name = "grpc"

    def __init__(self, queue: SendQueue[ServerMessage | Outgoing], epoch: int, *, why_not: str) -> None:
        self._queue, self._epoch, self._why_not = queue, epoch, why_not

    def terms(self) -> Plane:
        return Plane(kind=self.name, why_not=self._why_not)

    def gradients(self, place: Place, length: int) -> FloatArray:  # noqa: ARG002 - nowhere
        raise Unreachable(self._why_not)

    def deliver(self, result: Result) -> None:
        """Lasting words are read when they are sent; others are copied at once."""
        words = result.words if result.lasting else result.words.copy()
        self.sent += words.nbytes
        label = {"epoch": self._epoch, "step": result.step}
        self._queue.put(frames(ServerMessage, "parameters", words, first=result.start, **label))
        if result.complete:
            self._queue.put([ServerMessage(served=Served(epoch=self._epoch, step=result.step))])
