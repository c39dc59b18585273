"""Where a job listens, as the kernel tells, and what a stranger without credentials gets there."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from common.network.proofs import ANSWER, GREETING, MARK
from ps.planes.methods import JOIN
from tests.support.channels import ENDS

__all__ = ["ATTEMPTS", "GONE", "PATIENCE_S", "UNKNOWN", "Port", "family_of", "kind_of", "ports_of", "ports_of_all"]

LISTENS = "0A"  # of /proc/net/tcp
ACCEPTS = 1 << 16  # __SO_ACCEPTCON, of /proc/net/unix
PATIENCE_S = 3.0  # whoever says all that is asked for is dropped at once, less than a training takes
ALERT = b"\x15"  # the first byte of what TLS says last
GONE, UNKNOWN = "gone", "unknown"
OPEN = "it stays open"


@dataclass(frozen=True)
class Port:
    """A socket that listens; `address` as `connect` takes it."""

    inode: str
    family: int
    type: int
    address: str | tuple[str, int]

    def __str__(self) -> str:
        """As gRPC calls it."""
        if isinstance(self.address, tuple):
            return f"{self.address[0]}:{self.address[1]}"
        return f"unix-abstract:{self.address[1:]}" if self.address.startswith("\0") else f"unix:{self.address}"

    def dial(self, seconds: float) -> socket.socket:
        connection = socket.socket(self.family, self.type)
        try:
            connection.settimeout(seconds)
            connection.connect(self.address)
        except OSError as exc:
            connection.close()
            if isinstance(exc, ConnectionResetError):  # it closed before it had accepted
                raise ConnectionRefusedError from exc
            raise
        return connection


def family_of(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [each for child in (thread / "children").read_text().split() for each in family_of(int(child))]
    return found


def ports_of(pids: Sequence[int]) -> list[Port]:
    """All on which these processes, which share a network namespace, await connections."""
    own = sockets_of(pids)
    return [port for port in ports_of_all(pids[0]) if port.inode in own] if pids else []


def ports_of_all(pid: int | str = "self") -> list[Port]:
    """Of all processes in the network namespace of this one."""
    tcp = [(name, line) for name in ("tcp", "tcp6") for line in lines_of(name, pid)]
    found = [tcp_port(name, line) for name, line in tcp if line[3] == LISTENS]
    return found + [unix_port(line) for line in lines_of("unix", pid) if int(line[3], 16) & ACCEPTS]


def sockets_of(pids: Sequence[int]) -> set[str]:
    """Their numbers in the kernel's tables."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    found.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return {link.removeprefix("socket:[").rstrip("]") for link in found if link.startswith("socket:[")}


def lines_of(table: str, pid: int | str) -> list[list[str]]:
    """None of a process that has ended."""
    with suppress(OSError):
        return [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
    return []


def tcp_port(table: str, line: Sequence[str]) -> Port:
    """Of 0100007F:1F90, words of 4 bytes in the machine's order; gRPC's IPv4 stands in the table of IPv6."""
    host, _, port = line[1].partition(":")
    words = bytes.fromhex(host)
    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    if table == "tcp6" and packed.startswith(bytes(10) + b"\xff\xff"):
        table, packed = "tcp", packed[12:]
    family = socket.AF_INET6 if table == "tcp6" else socket.AF_INET
    return Port(line[9], family, socket.SOCK_STREAM, (socket.inet_ntop(family, packed), int(port, 16)))


def unix_port(line: Sequence[str]) -> Port:
    name = line[7] if len(line) > 7 else ""
    return Port(line[6], socket.AF_UNIX, int(line[4], 16), "\0" + name[1:] if name.startswith("@") else name)


def kind_of(
    port: Port, patience: float = PATIENCE_S, almost: Callable[[], object] = lambda: None, last: float = 0.0
) -> str:
    """Which of the kinds that we know it is, by how it refuses a stranger; UNKNOWN: it does not, or in another way;
    GONE: it has closed meanwhile.

    Args:
        almost: called before the last attempt, which may have to wait until the group has met,
        last: for so long.
    """
    answers: dict[str, str] = {}
    for doing, attempt in ATTEMPTS.items():
        if doing == LAST:
            almost()
        try:
            answers[doing] = attempt(port, max(patience, last) if doing == LAST else patience)
        except (ConnectionRefusedError, FileNotFoundError):
            return GONE if is_known(answers) else f"{UNKNOWN}: {answers}"
        if answers[doing] == GONE:
            return GONE
        if answers[doing] == OPEN:  # at once, before the job ends and closes it
            break
    for kind, refuses in KINDS.items():
        if answers == refuses:
            return kind
    last_answer = answers.popitem()
    if is_known(answers) and port not in ports_of_all():  # it closed while the last attempt waited to be let in
        return GONE
    return f"{UNKNOWN}: {dict([*answers.items(), last_answer])}"


def is_known(answers: Mapping[str, str]) -> bool:
    """Whether one of our kinds answers so, as far as it was asked."""
    return any(answers.items() <= refuses.items() for refuses in KINDS.values())


def say_something(port: Port, patience: float) -> str:
    """What is answered to plain bytes before the connection ends."""
    heard = b""
    with port.dial(patience) as stranger, suppress(ConnectionResetError, BrokenPipeError):
        stranger.sendall(b"\xff" * ANSWER.size)
        if port.type == socket.SOCK_SEQPACKET:
            stranger.setblocking(False)  # nobody looks before a trainer says that it has come
            with suppress(BlockingIOError):
                return "nothing" if not stranger.recv(99) else "words"
            return "nothing"
        try:
            while more := stranger.recv(4096):
                heard += more
        except TimeoutError:
            return OPEN
    if heard[: len(MARK)] == MARK and len(heard) == GREETING.size:
        return "a greeting"
    return "nothing" if heard[:1] in (b"", ALERT) else "words"


def begin_tls(port: Port, patience: float) -> str:
    """What becomes of a handshake without a certificate."""
    if port.type != socket.SOCK_STREAM:
        return "no stream"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with port.dial(patience) as connection:
        try:
            secured = context.wrap_socket(connection)
        except (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError):
            return GONE  # without a word: nobody of ours does that
        except ssl.SSLError:
            return "no TLS"
        except TimeoutError:
            return OPEN
        with secured:
            try:
                return "let in" if secured.recv(1) else "refused"
            except (ssl.SSLError, ConnectionResetError):
                return "refused"
            except TimeoutError:
                return OPEN


def call(port: Port, patience: float) -> str:
    """What gRPC makes of a call without credentials."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0), ENDS]
    with grpc.insecure_channel(str(port), options=options) as channel:
        try:
            channel.unary_unary(JOIN)(b"", timeout=patience)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "answered"


LAST = "bytes"
ATTEMPTS: dict[str, Callable[[Port, float], str]] = {"TLS": begin_tls, "gRPC": call, LAST: say_something}
KINDS = {  # and how one refuses
    "gRPC": {"TLS": "refused", "gRPC": "UNAVAILABLE", "bytes": "nothing"},
    "door": {"TLS": "no TLS", "gRPC": "UNAVAILABLE", "bytes": "a greeting"},
    "desk": {"TLS": "no stream", "gRPC": "UNAVAILABLE", "bytes": "nothing"},
}
