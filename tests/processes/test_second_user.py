"""What another user of this machine gets of a job, with a real second user."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from collective.membership.connections import MESH, Listener, call, key_of, seat_of
from common.credentials.credentials import TOKEN_VARIABLE, Credentials
from common.credentials.token import new_token
from common.errors import PortInUse
from common.network.rendezvous import RendezvousServer, join
from common.system.memory import Segment, Unreachable
from common.system.process import JOB_SECRET_VARIABLE
from ps.coordinator.servicer import ParameterServer
from ps.planes.shared_memory import Desk, OthersMemory, memory_of
from tests.support.groups import ROOT, on_threads

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a child as another user"),
]

NOBODY = 65534
DEADLINE_S = 40.0
AT_THE_DESK = """
import os, socket, sys
from common.system.handover import check_user
from common.system.memory import Segment, Unreachable
from ps.planes.shared_memory import OthersMemory
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with OthersMemory() as memory:
    try:
        memory.visit(sys.argv[1])
    except Unreachable as exc:
        print(exc)
stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # whom nothing at his own end holds back
stranger.connect("\\0" + sys.argv[1])
socket.send_fds(stranger, [bytes.fromhex(sys.argv[2]) + (64).to_bytes(8, "little")], [Segment(64).descriptor])
print("sent", flush=True)
sys.stdin.read()
"""


def test_another_user_neither_hands_in_nor_gets_anything() -> None:
    with Desk() as desk, Segment(64) as mine, OthersMemory() as trainers:
        command = [sys.executable, "-c", AT_THE_DESK, desk.name, mine.key.hex()]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == f"they are of different users ({NOBODY} and 0)\n"
            assert stranger.stdout.readline() == "sent\n"
            with pytest.raises(Unreachable, match="its memory was not handed over"):
                desk.segment(memory_of(mine))
            trainers.visit(desk.name).give(mine)
            assert desk.segment(memory_of(mine)).nbytes == 64
            stranger.communicate("")


AS_A_RANK = """
import sys
from collective.membership.connections import Listener, build_mesh, call
from common.credentials.credentials import TOKEN_VARIABLE, Credentials
from common.credentials.token import new_token
from common.errors import RendezvousError
from common.network.proofs import GREETING
import os, socket
os.setgroups([]); os.setgid(65534); os.setuid(65534)
token, ours = bytes(16), Credentials("job", "a test", bytes(32))
with Listener("", "", ours) as listener:
    try:
        build_mesh(1, [" " + sys.argv[1], ""], listener, token, data=(), timeout=5.0)
    except RendezvousError as exc:
        print(exc)
stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # whom nothing at his own end holds back
stranger.connect("\\0" + sys.argv[1])
print(stranger.recv(GREETING.size))
"""


def test_another_user_is_no_rank_of_a_ring_in_shared_memory() -> None:
    """Though it knows the token and the secret: it is not even greeted."""
    name, ours = f"gradsync-test-{os.getpid()}", Credentials("job", "a test", bytes(32))
    with Listener("", name, ours) as listener:
        door, seat = listener.door, seat_of((MESH, 1))
        door.admit({seat: key_of(bytes(16), 0, ours)})
        command = [sys.executable, "-c", AS_A_RANK, name]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
        why = f"they are of different users ({NOBODY} and 0); use --backend tcp"
        assert done.stdout.splitlines() == [f"rank 1 and rank 0 cannot share memory: {why}", "b''"]
        assert door.take(seat) is None
        with call(1, (MESH, 0), f" {name}", bytes(16), ours, DEADLINE_S):
            assert door.wait([seat], time.monotonic() + DEADLINE_S)
            connection = door.take(seat)
            assert connection is not None
            connection.close()


TRAINER = """
import encodings.idna, os, sys, tempfile
import common.credentials.contexts, common.credentials.issuing  # while Python can still be read
import ps, ps.connection
from common.errors import UsageError
clients = [ps.connect([address], 0, 1, plane) for plane, address in zip(("shm", "auto"), sys.argv[1:])]
os.setgroups([]); os.setgid(65534); os.setuid(65534)  # who may not read what Python imports later
for client in clients:
    with client:
        parameters, gradients = client.empty(9), client.empty(9)
        gradients[...] = 2
        try:
            client.register(parameters)
        except UsageError as exc:
            print(exc)
            continue
        client.push_pull(gradients)
        print(client.data_plane, gradients.tolist() == [2] * 9)
"""


def test_a_trainer_of_another_user_goes_over_tcp_unless_it_must_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """If both have the job's token."""
    monkeypatch.setenv(TOKEN_VARIABLE, new_token())
    with ParameterServer("127.0.0.1:0", 1) as first, ParameterServer("127.0.0.1:0", 1) as second:
        command = [sys.executable, "-c", TRAINER, first.address, second.address]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
        why = f"they are of different users ({NOBODY} and 0); use --data-plane auto, tcp or grpc"
        assert done.stdout.splitlines() == [
            f"server 0 at {first.address} and rank 0 cannot share memory: {why}",
            "tcp True",
        ]
        second.wait()


AT_THE_MEMORY = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
pid, descriptor = sys.argv[1:]
for name in (f"fd/{descriptor}", "mem", "environ", "map_files"):
    try:
        os.listdir(f"/proc/{pid}/{name}") if name == "map_files" else open(f"/proc/{pid}/{name}", "rb").close()
        print(name, "is open")
    except PermissionError:
        pass
"""


def test_another_user_reaches_no_memory_through_proc() -> None:
    with Segment(64) as mine:
        command = [sys.executable, "-c", AT_THE_MEMORY, str(os.getpid()), str(mine.descriptor)]
        assert subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True).stdout == ""


AT_THE_PORT = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with socket.socket() as squatter:
    squatter.bind(("127.0.0.1", 0))
    squatter.listen()
    print(squatter.getsockname()[1], flush=True)
    sys.stdin.read()
"""


def test_a_port_that_another_user_has_taken_is_named_at_once() -> None:
    command = [sys.executable, "-c", AT_THE_PORT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as squatter:
        assert squatter.stdout is not None
        port = int(squatter.stdout.readline())
        begin = time.monotonic()
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}"):
            ParameterServer(f"127.0.0.1:{port}", 1)
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}"):
            ParameterServer("127.0.0.1:0", 1, data_port=port)
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}"):
            RendezvousServer(f"127.0.0.1:{port}", 1, timeout=1.0)
        assert time.monotonic() - begin < 3.0  # 1 s each
        squatter.communicate("")


AT_THE_RENDEZVOUS = """
import encodings.idna, os, sys, tempfile
import common.credentials.contexts, common.credentials.issuing  # while Python can still be read
from common.errors import CredentialsRefused
from common.network.rendezvous import join
os.setgroups([]); os.setgid(65534); os.setuid(65534)
names = [line.split()[-1] for line in open("/proc/net/unix") if sys.argv[1] in line]
with tempfile.TemporaryDirectory() as own:
    os.environ["XDG_RUNTIME_DIR"] = own  # where his own secret will be
    for rank in (0, 1):
        try:
            join(f"unix-abstract:{names[0][1:]}", rank=rank, nranks=2, backend="shm", address="", timeout=20.0)
            print("it is in")
        except CredentialsRefused as exc:
            print(exc)
"""


def test_another_user_who_reads_the_name_of_the_rendezvous_is_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"gradsync-test-{os.getpid()}-meeting"
    monkeypatch.setenv(JOB_SECRET_VARIABLE, "5" * 64)
    with RendezvousServer(f"unix-abstract:{name}", 2, timeout=DEADLINE_S) as server:
        command = [sys.executable, "-c", AT_THE_RENDEZVOUS, name]
        without = {key: value for key, value in os.environ.items() if key != JOB_SECRET_VARIABLE}
        done = subprocess.run(command, cwd=ROOT, env=without, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
        lines = done.stdout.splitlines()
        assert len(lines) == 2
        assert all("does not belong to this job" in line or "does not take" in line for line in lines), lines
        members = on_threads(
            2, lambda rank: join(server.address, rank=rank, nranks=2, backend="shm", address="", timeout=DEADLINE_S)
        )
    assert {len(member.addresses) for member in members} == {2}
