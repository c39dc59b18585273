"""What ranks tell each other beside the data: small JSON objects, length first, on a socket of every two ranks.

These are the messages:

    {"leave": reason}                    I am going: training is complete (reason ""), or I failed
    {"leave": reason, "because": [kind, text, rank]}   ... because of another rank, with the error that says so
    {"waiting?": 1} / {"waiting!": s}    give a sign of life / here: I have waited for s seconds (0: I do not wait)
    {"say": line}                        write this to your stderr
    {"note": [numbers]}                  what the algorithm above has to say to this rank
    {"segment": id, "nbytes": n}         a segment of my memory; its descriptor comes with the message (Unix sockets)
    {"segment": id, "nbytes": n, "of": rank}           ... of another rank's, passed on
    {"lost": [kind, text, rank]}         the group cannot go on, because of that rank; passed on
    {"signs": [...]}                     what I know of all ranks (signs.py)
    {"piece": [channel, n, last]}        n bytes follow: the next piece, perhaps the last, of what MeshMessenger sends

Only pieces are large. What is to be sent while one is under way waits for the rest of it, and nobody waits for that.
What is none of these, or larger or more than MOST_* allow, ends the connection with a ProtocolError.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from collective.membership.signs import Told
from common.errors import GradSyncError, LayoutMismatch, NonFiniteGradient, PeerLost, ProtocolError, error_from_name
from common.network.sockets import host_of_peer
from common.network.tls_sockets import pending_in
from common.system.handover import receive

__all__ = ["PIECE_BYTES", "Peer", "frame"]

LENGTH = struct.Struct("<I")
READ_BYTES = 65_536
PIECE_BYTES = 262_144  # of a large message, between which a sign of life may pass
MOST_PARTS = 16  # in one system call
LEAVE_S = 1.0  # for what a failed rank has not sent yet, before its last word
MOST_BYTES = 1 << 20  # of a message but a piece; an error's text may be long
MOST_DESCRIPTORS = 1 << 12  # that have come and that nobody has taken yet
SHARED = (LayoutMismatch.__name__, NonFiniteGradient.__name__)  # errors that all ranks raise, in the same words
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Number = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Message(Struct, frozen=True):
    """Any of them; what it does not have is None."""

    leave: str | None = None
    because: tuple[str, str, int] | None = None
    asks: int | None = msgspec.field(default=None, name="waiting?")
    waits: Annotated[float, Meta(ge=0)] | None = msgspec.field(default=None, name="waiting!")
    say: str | None = None
    note: list[Number] | None = None
    segment: Count | None = None
    nbytes: Count | None = None
    owner: Count | None = msgspec.field(default=None, name="of")
    lost: tuple[str, str, Count] | None = None
    signs: Told | None = None
    piece: tuple[Count, Annotated[int, Meta(ge=0, le=PIECE_BYTES)], bool] | None = None


DECODER = msgspec.json.Decoder(Message)


class Peer:
    """The socket to another rank, and what it has said; nothing here waits for it to say something.

    Args:
        waits: tells for how many seconds this rank has waited; 0: it does not.

    Attributes:
        left: it said that its training is complete, or it is gone.
        failure: the first reason for which the group cannot go on that was heard from it, and the rank at fault.
        heard_at: when anything was heard last, monotonic seconds.
        waited: for how many seconds, as it said last.
        lines: to be shown.
        signs: what it told of all ranks last, not yet taken.
        passing: segments of its own or of others (owner, number) that came and were not passed on yet.
        messages: those for `MeshMessenger` that are whole, by channel.
        carried: how many bytes of them have come.
        unsent: what the socket has not taken yet.
        gone: it takes no more.
        host: its address; "": it is on this host, or was gone already.
    """

    def __init__(self, rank: int, connection: socket.socket, waits: Callable[[], float]) -> None:
        self.rank, self.connection, self._waits = rank, connection, waits
        self.host = host_of_peer(connection)
        self.left = False
        self.heard_at, self.waited = 0.0, 0.0
        self.failure: tuple[GradSyncError, int] | None = None
        self.notes: deque[list[int]] = deque()  # received, not yet taken
        self.segments: dict[tuple[int, int], tuple[int, int]] = {}  # owner, number -> (descriptor, bytes), likewise
        self.passing: list[tuple[int, int]] = []
        self.lines: deque[str] = deque()
        self.signs: Told | None = None
        self.messages: dict[int, deque[bytearray]] = {}
        self.carried = 0
        self.unsent: deque[memoryview] = deque()
        self.gone = False
        self._descriptors: deque[int] = deque()  # of messages that are to come
        self._unread = bytearray()
        self._message, self._channel = bytearray(), 0  # that comes in pieces
        self._missing, self._last = 0, False  # bytes of the piece under way; whether it ends the message
        self._scratch = memoryview(b"")  # made when the first large piece comes
        connection.setblocking(False)

    def send(self, message: dict[str, Any], *, timeout: float, descriptors: Sequence[int] = ()) -> None:
        """Blocks at most `timeout` seconds, while the socket is full, and not at all while a piece is under way, unless
        this is the last word. Never raises: reading says who is gone."""
        framed = frame(message)
        leaves = "leave" in message
        if self.unsent and not (leaves or descriptors):
            self.unsent.append(memoryview(framed))
            self.push()
            return
        with suppress(OSError):
            sent = 0
            if not (descriptors or self.unsent):
                with suppress(BlockingIOError):
                    sent = self.connection.send(framed)
            if sent == len(framed):
                return
            self.connection.settimeout(min(timeout, LEAVE_S) if leaves and self.unsent else timeout)
            while self.unsent:
                self.connection.sendall(self.unsent[0])
                self.unsent.popleft()
            if descriptors:
                sent = socket.send_fds(self.connection, [framed], descriptors)
            self.connection.sendall(framed[sent:])
        with suppress(OSError):
            self.connection.setblocking(False)

    def post(self, framed: bytes) -> None:
        """Send what `frame` made; what the socket does not take at once stays in `unsent`, to be pushed."""
        self.unsent.append(memoryview(framed))
        self.push()

    def put_piece(self, channel: int, piece: memoryview, *, last: bool) -> None:
        """To be pushed; it must keep its contents until then."""
        self.unsent.append(memoryview(frame({"piece": [channel, len(piece), last]})))
        if piece:
            self.unsent.append(piece)

    def push(self) -> bool:
        """Give the socket as much as it takes at once; whether it took anything."""
        moved = False
        while self.unsent:
            try:
                sent = self.connection.sendmsg(list(islice(self.unsent, MOST_PARTS)))
            except BlockingIOError:
                return moved
            except OSError:  # reading says why
                self.unsent.clear()
                self.gone = True
                return False
            moved = True
            while self.unsent and sent >= len(self.unsent[0]):
                sent -= len(self.unsent.popleft())
            if sent:
                self.unsent[0] = self.unsent[0][sent:]
        return moved

    def read(self, *, timeout: float) -> bool:
        """Take in what has arrived, and answer it (see `send` for the timeout); whether more of a message is to come
        that has begun."""
        try:
            if self._missing and not self._unread:
                self._read_piece()
                return self._missing > 0 or bool(self._message)
            data = self._received()
        except BlockingIOError:
            return False
        except ProtocolError as exc:
            self._fail(exc, self.rank)
            data = b""
        except OSError:
            data = b""
        self._unread += data
        self.heard_at = time.monotonic()
        try:
            self._take_all(timeout)
        except ProtocolError as exc:
            self._give_up(exc)
        if not data and not self.left:
            self._give_up(PeerLost(f"rank {self.rank} died: its connection closed without a goodbye"))
        return self._missing > 0 or bool(self._message)

    def _take_all(self, timeout: float) -> None:
        """What of that which has come is whole."""
        if len(self._descriptors) + len(self.segments) > MOST_DESCRIPTORS:
            raise ProtocolError(f"rank {self.rank} handed over more than {MOST_DESCRIPTORS:,} descriptors")
        while self._unread:
            if self._missing:
                part = min(self._missing, len(self._unread))
                self._carry(self._unread[:part])
                del self._unread[:part]
            elif (message := self._next()) is None:
                break
            else:
                self._take(message, timeout)

    def _give_up(self, error: GradSyncError) -> None:
        """Nothing more is read of it."""
        self._fail(error, self.rank)
        self.left, self._missing = True, 0
        self._unread.clear()
        self._message = bytearray()

    @property
    def has_more(self) -> bool:
        """Something can be read of which polling the socket tells nothing."""
        return not self.left and pending_in(self.connection) > 0

    def _received(self) -> bytes:
        """As much as is read at once, but of a piece; raises as `recv`."""
        if self.connection.family != socket.AF_UNIX:
            return self.connection.recv(READ_BYTES)
        data, descriptors = receive(self.connection, READ_BYTES, 16)
        self._descriptors.extend(descriptors)
        return data

    def _read_piece(self) -> None:
        """Of the piece under way no more than belongs to it: a descriptor may come with what follows."""
        if not self._scratch:
            self._scratch = memoryview(bytearray(PIECE_BYTES))
        count = self.connection.recv_into(self._scratch[: self._missing])
        if not count:
            raise ConnectionResetError
        self.heard_at = time.monotonic()
        self._carry(self._scratch[:count])

    def _carry(self, part: bytearray | memoryview) -> None:
        self._message += part
        self._missing -= len(part)
        self.carried += len(part)
        self._end_piece()

    def _end_piece(self) -> None:
        if not self._missing and self._last:
            self.messages.setdefault(self._channel, deque()).append(self._message)
            self._message = bytearray()

    def _next(self) -> Message | None:
        """The next message, if it is whole.

        Raises:
            ProtocolError: it is none, or too long.
        """
        if len(self._unread) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._unread)
        if size > MOST_BYTES:
            raise ProtocolError(f"rank {self.rank} announced a message of {size:,} bytes, more than {MOST_BYTES:,}")
        if len(self._unread) < LENGTH.size + size:
            return None
        try:
            message = DECODER.decode(self._unread[LENGTH.size : LENGTH.size + size])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ProtocolError(f"rank {self.rank} sent a message that cannot be decoded: {exc}") from exc
        del self._unread[: LENGTH.size + size]
        return message

    def close(self) -> None:
        """Give back the socket and the descriptors that nobody took."""
        self.connection.close()
        for descriptor in [*self._descriptors, *(d for d, _ in self.segments.values())]:
            os.close(descriptor)

    def _take(self, message: Message, timeout: float) -> None:
        """
        Raises:
            ProtocolError: it says nothing that can be meant.
        """
        if message.note is not None:
            self.notes.append(message.note)
        elif message.piece is not None:
            self._channel, self._missing, self._last = message.piece
            self._end_piece()
        elif message.segment is not None:
            self._take_segment(self.rank if message.owner is None else message.owner, message.segment, message.nbytes)
        elif message.asks is not None:
            self.send({"waiting!": self._waits()}, timeout=timeout)
        elif message.waits is not None:
            self.waited = message.waits
        elif message.say is not None:
            self.lines.append(message.say)
        elif message.lost is not None:
            kind, text, culprit = message.lost
            self._fail(error_from_name(kind, text), culprit)
        elif message.signs is not None:
            self.signs = message.signs
        elif message.leave is not None:
            self._take_leave(message.leave, message.because)
        else:
            raise ProtocolError(f"rank {self.rank} sent a message of no known kind")

    def _take_segment(self, owner: int, number: int, nbytes: int | None) -> None:
        if nbytes is None or not self._descriptors or (owner, number) in self.segments:
            raise ProtocolError(f"rank {self.rank} offered segment {number} without its memory, or twice")
        self.segments[owner, number] = (self._descriptors.popleft(), nbytes)
        self.passing.append((owner, number))

    def _take_leave(self, reason: str, because: tuple[str, str, int] | None) -> None:
        self.left = True
        if because is not None:
            kind, text, culprit = because
            self._fail(error_from_name(kind, text), culprit)
        elif reason:
            kind, _, text = reason.partition(": ")
            error = PeerLost(f"rank {self.rank} left with {reason}")
            self._fail(error_from_name(kind, text) if kind in SHARED else error, self.rank)

    def _fail(self, error: GradSyncError, culprit: int) -> None:
        self.failure = self.failure or (error, culprit)


def frame(message: dict[str, Any]) -> bytes:
    data = json.dumps(message, ensure_ascii=False).encode(errors="replace")
    return LENGTH.pack(len(data)) + data
