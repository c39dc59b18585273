"""How two processes of a job show each other, on a new connection, that they belong to it, and whose seat it is.

    listener  MARK, nonce                             20 bytes
    caller    seat (u32), nonce, proof of "caller"    52 bytes
    listener  proof of "listener"                     32 bytes

A proof is an HMAC-SHA256 over who gives it, the seat, both nonces and, on one host, both ports; its key is the seat's,
which both ends know and neither tells. So what was overheard is of no use on another connection, nor is what somebody
in between passes on, who has another port.

Between hosts, where the processes have credentials, this happens inside TLS 1.3, in whose handshake both ends show
certificates. Unix sockets come from this user only.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import ssl
import struct
import time
from dataclasses import dataclass, field

from common.credentials.credentials import Credentials
from common.errors import PeerUnreachable, ProtocolError
from common.network.sockets import tuned
from common.network.tls_sockets import secured
from common.system.handover import check_user

__all__ = ["CLOSED", "HANDSHAKE_S", "Nonces", "connect_to", "encrypts", "seat_key"]

MARK = b"GSD2"
NONCE_BYTES = 16
PROOF_BYTES = 32
GREETING = struct.Struct(f"<4s{NONCE_BYTES}s")  # mark, nonce
ANSWER = struct.Struct(f"<I{NONCE_BYTES}s{PROOF_BYTES}s")  # seat, nonce, proof
PROVEN = struct.Struct(f"<8sI{NONCE_BYTES}s{NONCE_BYTES}sHH")  # who, seat, nonces and ports of listener and caller
HANDSHAKE_S = 5.0  # a listener waits no longer for who has called
CLOSED = "the connection was closed: the other end has ended, has other credentials, or is another job's"
ENCRYPT_LOOPBACK = False  # for tests, and to measure what it costs


@dataclass(frozen=True)
class Nonces:
    """What one connection has of its own, by which a proof is for it alone."""

    listener: bytes
    caller: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    ports: tuple[int, int] = (0, 0)  # likewise; 0 where they may differ on the way

    def proof(self, key: bytes, who: bytes, seat: int) -> bytes:
        return hmac.digest(key, PROVEN.pack(who, seat, self.listener, self.caller, *self.ports), "sha256")


def seat_key(credentials: Credentials, purpose: bytes, *more: bytes) -> bytes:
    """Of seats for a purpose: by the credentials, and by what else both ends know of the seat."""
    return b"\0".join((credentials.proof_key(b"seat of " + purpose), *more))


def encrypts(connection: socket.socket, credentials: Credentials) -> bool:
    """Whether a connection is over TLS: between hosts, for those who have credentials. Both ends find the same."""
    if connection.family == socket.AF_UNIX or not credentials.secure:
        return False
    return ENCRYPT_LOOPBACK or not stays_here(connection)


def stays_here(connection: socket.socket) -> bool:
    """Whether both addresses of a TCP connection are of the loopback."""
    return all(on_loopback(end[0]) for end in (connection.getsockname(), connection.getpeername()))


def on_loopback(host: str) -> bool:
    """Of an address, which a socket for both IPv4 and IPv6 writes in the latter's way."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def ports_of(connection: socket.socket, *, caller: bool) -> tuple[int, int]:
    """Of listener and caller, where both ends see the same: on one host."""
    if connection.family == socket.AF_UNIX or not stays_here(connection):
        return 0, 0
    own, other = connection.getsockname()[1], connection.getpeername()[1]
    return (other, own) if caller else (own, other)


def connect_to(
    address: tuple[str, int] | str,
    seat: int,
    key: bytes,
    credentials: Credentials,
    seconds: float,
    *,
    who: str,
    peer: str,
) -> socket.socket:
    """Open a connection with a member, prove to it whose seat it is, and make sure that it is one.

    Args:
        address: (host, port), or the name of an abstract Unix socket.
        seconds: how long it may take.
        who, peer: the caller and who is called, for errors.

    Raises:
        PeerUnreachable: why it cannot be had, in words that go on after the name of what was called.
        Unreachable: there is another user's.
    """
    end = time.monotonic() + seconds
    try:
        connection = dial(address, seconds)
    except OSError as exc:
        raise PeerUnreachable(f"was not reached within {seconds:g} s ({exc.strerror or exc})") from exc
    try:
        if connection.family == socket.AF_UNIX:
            check_user(connection)
        if encrypts(connection, credentials):
            connection.settimeout(max(0.001, end - time.monotonic()))
            connection = opened = secured(connection, credentials.client_context(), server=False)
            opened.peer = peer
            opened.do_handshake()
        prove(connection, seat, key, end)
        return tuned(connection)
    except (OSError, ProtocolError) as exc:
        connection.close()
        raise PeerUnreachable(f"did not let {who} in ({why(exc)})") from exc
    except BaseException:
        connection.close()
        raise


def dial(address: tuple[str, int] | str, seconds: float) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_connection(address, seconds)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect("\0" + address)
    except OSError:
        connection.close()
        raise
    return connection


def prove(connection: socket.socket, seat: int, key: bytes, deadline: float) -> None:
    """The caller's part.

    Raises:
        OSError: the other end does not know the key, or does not answer.
    """
    mark, nonce = GREETING.unpack(receive(connection, GREETING.size, deadline))
    if mark != MARK:
        raise ConnectionError("somebody else answers there")
    nonces = Nonces(nonce, ports=ports_of(connection, caller=True))
    connection.sendall(ANSWER.pack(seat, nonces.caller, nonces.proof(key, b"caller", seat)))
    answer = receive(connection, PROOF_BYTES, deadline)
    if not hmac.compare_digest(answer, nonces.proof(key, b"listener", seat)):
        raise ConnectionError("somebody else answers there")


def receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """So many bytes.

    Raises:
        OSError: they did not come.
    """
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError(CLOSED)
        data += more
    return data


def why(error: BaseException) -> str:
    if isinstance(error, ProtocolError) and error.__cause__:  # under TLS 1.3 a refusal comes behind the handshake
        return why(error.__cause__)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not of this job: {getattr(error, 'verify_message', error)}"
    if isinstance(error, (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError)):
        return CLOSED
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).lower().replace("_", " ")
        return "it does not encrypt; give all the same credentials" if "wrong version" in reason else f"TLS: {reason}"
    return str(getattr(error, "strerror", None) or error)
