"""`python -m tests.faults.stranger HOME PID...`: a stranger's visit at every port of these processes, as JSON.

He has our code and the protocol, knows what a member has said over the network (HOME/heard), and comes with every
kind of credentials but the job's own (whose token, in HOME/token, serves to make those that are nearly right). What he
says would end any group that heard it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Semaphore

import grpc

from common.credentials.credentials import Credentials
from common.credentials.derived import SECRET_BYTES
from common.credentials.identity import MEMBER_NAME
from common.credentials.token import read_token
from common.errors import GradSyncError
from common.network import rendezvous
from common.network.gradsync_pb2 import JoinRequest
from common.network.proofs import connect_to, seat_key
from common.system.process import prepare_process
from ps.planes.methods import JOIN, SESSION, STATUS
from tests.support.certificates import Authority, credentials_of
from tests.support.channels import ENDS
from tests.support.ports import Port, kind_of, ports_of

__all__ = ["IDENTITIES"]

PATIENCE_S = 3.0
LOOK_S = 1.0
MEETING_S = 20.0  # a door judges whoever has answered when the group has met
IDENTITIES = ("another token", "another authority", "expired", "not yet valid", "another name")
WRONG = JoinRequest(version="9", rank=0, nranks=99, backend="stranger").SerializeToString()
METHODS = (JOIN, SESSION, STATUS, rendezvous.METHOD)


def identities(home: Path) -> dict[str, Credentials]:
    nearly = Authority(read_token(home / "token")).strangers()
    others = Credentials("token", "another token", os.urandom(SECRET_BYTES))
    return {"another token": others, **{name: credentials_of(identity) for name, identity in nearly.items()}}


def visit(port: Port, home: Path, almost: Callable[[], object]) -> dict[str, str]:
    """What he gets there: of which kind it is, and how it answers each attempt."""
    if is_metrics(port):
        almost()
        return {"kind": "metrics"}
    kind = kind_of(port, PATIENCE_S, almost, MEETING_S)
    return {"kind": kind, **(attempts_at(port, home) if kind == "gRPC" else {})}


def attempts_at(port: Port, home: Path) -> dict[str, str]:
    found = {name: call(port, mine) for name, mine in identities(home).items()}
    found["no certificate"] = call(port, None, root=Authority(read_token(home / "token")).identity().authority)
    return found


def call(port: Port, mine: Credentials | None, *, root: bytes = b"") -> str:
    """How every method is refused; "answered" if one is not."""
    options = [("grpc.ssl_target_name_override", MEMBER_NAME), ("grpc.use_local_subchannel_pool", 1), ENDS]
    shown = mine.grpc_channel_credentials() if mine else grpc.ssl_channel_credentials(root)
    codes = set()
    with grpc.secure_channel(str(port), shown, options=options) as channel:
        for method in METHODS:
            try:
                list(channel.stream_stream(method)(iter([WRONG]), timeout=PATIENCE_S))
                codes.add("answered")
            except grpc.RpcError as error:
                codes.add(error.code().name)
    return " ".join(sorted(codes))


def knock(port: Port, mine: Credentials) -> str:
    """At a door, for the seats that there may be."""
    for seat in (0, 1, (1 << 24) + 1):
        key = seat_key(mine, b"a rank", bytes(16), b"0")
        address = port.address if isinstance(port.address, tuple) else port.address.removeprefix("\0")
        try:
            connect_to(address, seat, key, mine, MEETING_S, who="a stranger", peer="a member").close()
        except GradSyncError:
            continue
        return "let in"
    return "refused"


def say_again(port: Port, heard: bytes) -> str:
    """What a member has said when it connected, on a connection of one's own."""
    try:
        with port.dial(PATIENCE_S) as stranger:
            stranger.sendall(heard)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):
                pass
    except TimeoutError:
        return "it stays open"
    except OSError:  # it was closed before that
        pass
    return "refused"


def is_metrics(port: Port) -> bool:
    with suppress(OSError, HTTPException), closing(HTTPConnection(str(port), timeout=LOOK_S)) as connection:
        connection.request("GET", "/metrics")
        return b"gradsync_steps" in connection.getresponse().read()
    return False


def namespace_of(pid: int | str) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def main(home: Path, pids: list[int]) -> None:
    prepare_process()
    away = namespace_of("self") != namespace_of(pids[0])
    ports = [each for each in ports_of(pids) if not away or is_open_to_others(each)]
    heard = {name: bytes.fromhex(data) for name, data in json.loads((home / "heard").read_text()).items()}
    almost = Semaphore(0)
    with ThreadPoolExecutor(64) as pool:
        visits = {port: pool.submit(visit, port, home, almost.release) for port in ports}
        streams = [port for port in ports if port.type == socket.SOCK_STREAM]
        knocks = {
            (port, who): pool.submit(knock, port, mine) for who, mine in identities(home).items() for port in streams
        }
        for _ in ports:
            almost.acquire(timeout=MEETING_S)
        print("nearly done", flush=True)
        told = {str(port): each.result() for port, each in visits.items()}
        for (port, who), each in knocks.items():
            if told[str(port)]["kind"] in ("door", "gRPC"):  # over TLS a door looks like gRPC
                told[str(port)][f"{who} at a door"] = each.result()
        for port in ports:
            if data := heard.get(str(port)):
                told[str(port)]["what was overheard"] = say_again(port, data)
    print(json.dumps(told))


def is_open_to_others(port: Port) -> bool:
    return isinstance(port.address, tuple) and not port.address[0].startswith("127.")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(each) for each in sys.argv[2:]])
