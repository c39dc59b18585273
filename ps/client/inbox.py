"""What a trainer has heard from one server."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from common.errors import GradSyncError, PeerLost, ProtocolError, StaleEpoch, error_from_name
from common.network.gradsync_pb2 import Chunk, Plane, Served, ServerMessage, StatePiece
from common.network.reach import is_cut_off
from common.tensors.arena import FloatArray
from ps.client.mail import Mail
from ps.planes.protobuf_messages import data_of
from ps.store.shards import Shard

__all__ = ["FAREWELL_S", "Inbox"]

SIGN_S = 0.2
FAREWELL_S = 2.0  # how long a leaving trainer waits for a server to take note, and any for why a connection has ended


class Inbox:
    """Takes each message as it comes, words straight to where they belong; `changed` is notified of all else.

    Args:
        name: the server's.
        epoch: of the group; what is of another one is refused.
        mail: takes what other trainers send.
        host: the server's address; "": it is on this host.
    """

    def __init__(
        self, name: str, changed: threading.Condition, epoch: int = 0, mail: Mail | None = None, host: str = ""
    ) -> None:
        self.name, self._changed, self._epoch, self._mail, self._host = name, changed, epoch, mail, host
        self.heard_at = time.monotonic()
        self.unanswered = True  # something was sent over gRPC, and nothing has come back since
        self.error: GradSyncError | None = None
        self.terms = Plane()  # how data travel; known when the first parameters have arrived
        self.shard = Shard(0, 0)
        self.words_come = False  # over a data connection
        self._target: FloatArray = np.empty(0, np.float32)  # what is served next is written to; the whole arena's
        self.version = -1  # how many steps the parameters that have wholly arrived are old
        self.served = Served()  # what told so
        self.last_served = 0  # of a server that has failed: the step whose result it had sent before
        self.words_at = 0.0  # when the last words came, over a data connection
        self._came: list[tuple[int, int]] = []  # of the words of the next version: where each run begins and ends
        self.gathered: dict[int, bytearray] = {}  # by sequence number
        self._gathers = 0  # how many have wholly arrived
        self._gathering = bytearray()  # what has arrived of the next one
        self._state: list[StatePiece] = []  # what has arrived of the optimizer state asked for
        self._asked = 0  # how often it was
        self._told = 0  # the last such request whose answer has wholly arrived
        self._welcome = threading.Event()  # until then words are not taken; set but for a step committed ahead
        self._welcome.set()
        self._closed = False
        self.answer: Callable[[], None] = lambda: None  # gives the server a sign of life

    def begin(self, shard: Shard, target: FloatArray) -> None:
        """The server has this shard; what it serves is written to `target`, of the whole arena."""
        self.shard, self._target = shard, target

    def expect(self, target: FloatArray, *, version: int | None = None) -> None:
        """What is served next is written to `target`; it is of the step after `version`, if that is not the last."""
        self._target = target
        self.version = self.version if version is None else version

    def has_sent(self) -> None:
        """Something was sent over gRPC, which the server has not answered yet."""
        self.unanswered = True

    def expect_state(self) -> int:
        """An optimizer state is asked for; the number of that request."""
        self._state = []
        self._asked += 1
        return self._asked

    @property
    def has_state(self) -> bool:
        """Whether all of it has come."""
        return bool(self._state) and self._state[-1].last

    def take_state(self) -> list[StatePiece]:
        """What has come of it, once."""
        state, self._state = self._state, []
        return state

    def hold(self) -> None:
        """Take no words until `welcome`: the program still reads what they would replace."""
        self._welcome.clear()

    def welcome(self) -> None:
        """Words are taken from now on."""
        self._welcome.set()

    def close(self) -> None:
        """Whatever comes from now on is not heard."""
        self._closed = True
        self._welcome.set()
        with self._changed:
            self._changed.notify_all()

    def release(self) -> None:
        """Let go of the arena: nothing comes any longer over gRPC."""
        self._target = np.empty(0, np.float32)

    def take(self, message: ServerMessage, words: FloatArray | None = None) -> None:
        """
        Raises:
            ProtocolError: words that cannot be meant.
        """
        self.heard_at = time.monotonic()
        kind = message.WhichOneof("kind")
        if kind is None:  # a sign of life, which answers nothing
            return
        if kind == "alive":
            self.answer()
            if message.alive.say:
                print(message.alive.say, file=sys.stderr, flush=True)
            return
        if self._mail and kind in ("parcel", "taken"):  # neither does this
            self._mail.take(message, self.name)
            return
        if self._came_before(message):
            return
        self.unanswered = False
        if kind == "parameters":
            self._write(message.parameters, data_of(message.parameters) if words is None else words)
            return
        with self._changed:
            if kind == "served":
                self._check_complete(message.served)
                self.version, self.served = message.served.step, message.served
            elif kind == "plane":
                self.terms = message.plane
            elif kind == "gathered":
                self._check_epoch(message.gathered.epoch)
                self._gathering += message.gathered.data
                if len(self._gathering) > message.gathered.size:
                    raise ProtocolError(f"{self.name} sent more of a gather than its {message.gathered.size:,} bytes")
                if len(self._gathering) == message.gathered.size:
                    self.gathered[message.gathered.sequence] = self._gathering
                    self._gathers = message.gathered.sequence + 1
                    self._gathering = bytearray()
            elif kind == "state":
                self._check_epoch(message.state.epoch)
                if message.state.request != self._asked:
                    raise ProtocolError(f"{self.name} sent optimizer state that was not asked for")
                self._state.append(message.state)
                if message.state.last:
                    self._told = self._asked
            elif kind == "failure":
                self.error = self.error or error_from_name(message.failure.kind, message.failure.message)
                self.last_served = message.failure.served
            self._changed.notify_all()

    def _came_before(self, message: ServerMessage) -> bool:
        """Whether this is an answer once more, because the question has come twice. It says nothing of what was sent
        since: a note through shared memory might overtake that if this were taken for its answer."""
        kind = message.WhichOneof("kind")
        return (
            (kind == "plane" and bool(self.terms.kind))
            or (kind == "gathered" and message.gathered.sequence < self._gathers)
            or (kind == "state" and message.state.request <= self._told)
        )

    def place(self, chunk: Chunk, size: int) -> FloatArray | None:
        """Where so many words are to be written; None: not before they are welcome.

        Raises:
            ProtocolError: they cannot be meant.
        """
        self.heard_at = time.monotonic()
        self._check(chunk, size)
        if self._closed or not self._welcome.is_set():
            return None
        self._came.append((chunk.start, chunk.start + size))
        self.words_at = self.heard_at
        return self._target[chunk.start : chunk.start + size]

    def took_words(self) -> None:
        """Some have been written there."""
        self.heard_at = self.words_at = time.monotonic()
        self.unanswered = False

    def hung_up(self) -> None:
        """The data connection has ended: the session hears why, perhaps a moment later.

        Over a link that carries nothing to the server it never does: TCP holds a last word back until what was sent
        before it is acknowledged. Then `Servers.wait` says so, when it has waited for --timeout, too.
        """
        while True:
            with self._changed:
                is_told = self._changed.wait_for(lambda: self.error is not None or self._closed, FAREWELL_S)
            if is_told or not (self._host and is_cut_off(self._host)):
                break
        self.fail(PeerLost(f"{self.name} was lost while training (its data connection was closed)"))

    def fail(self, error: GradSyncError) -> None:
        """Nothing more will come."""
        with self._changed:
            if not self._closed:
                self.error = self.error or error
            self._changed.notify_all()

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StaleEpoch(f"{self.name} sent a message of epoch {epoch}, this is epoch {self._epoch}")

    def _check_complete(self, served: Served) -> None:
        """All words that were to come for it have, each once; in shared memory none do."""
        self._check_epoch(served.epoch)
        if served.step != self.version + 1:
            raise ProtocolError(f"{self.name} served step {served.step}, expected {self.version + 1}")
        came, self._came = sorted(self._came), []
        if not (came or self.words_come or self.terms.kind == "grpc"):
            return
        upto = self.shard.start
        for start, stop in [*came, (self.shard.stop, self.shard.stop)]:
            if start != upto:
                gap = f"{upto}..{start} of step {served.step} never"
                what = gap if start > upto else f"{start}..{upto} of step {served.step} twice"
                raise ProtocolError(f"{self.name} sent elements {what}")
            upto = stop

    def _check(self, chunk: Chunk, size: int) -> None:
        self._check_epoch(chunk.epoch)
        if not self.shard.start <= chunk.start <= chunk.start + size <= self.shard.stop:
            raise ProtocolError(f"{self.name} sent elements {chunk.start}..{chunk.start + size} outside {self.shard}")
        if chunk.step != self.version + 1:
            raise ProtocolError(f"{self.name} sent parameters of step {chunk.step}, expected {self.version + 1}")

    def _write(self, chunk: Chunk, data: FloatArray) -> None:
        self._check(chunk, data.size)
        while not self._welcome.wait(SIGN_S):  # for the commit, or for the end of the session
            self.answer()  # unasked: nobody is heard meanwhile
        if not self._closed:
            self._came.append((chunk.start, chunk.start + data.size))
            self._target[chunk.start : chunk.start + data.size] = data
