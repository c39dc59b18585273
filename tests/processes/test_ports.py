"""Every port of a training, as the kernel lists them: a stranger is refused there, and the training goes on."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Semaphore

import numpy as np
import psutil
import pytest

import ps
from collective.membership.connections import Listener
from common.network.rpc import is_loopback
from ps.coordinator.servicer import ParameterServer
from tests.support.commands import JOB, Started, digest_in, until
from tests.support.credentials import with_secret
from tests.support.crowds import Crowd
from tests.support.groups import free_port
from tests.support.ports import ATTEMPTS, GONE, UNKNOWN, Port, family_of, kind_of, ports_of, ports_of_all

pytestmark = pytest.mark.processes

STEPS = 1000  # of a training by servers, whose ports stay open
FEW_STEPS = 20
ALL_S = 20.0
MORE_THREADS = 8  # gRPC's own, and the stranger's
MORE_BYTES = 100 << 20
TCP, UNIX, SEQPACKET = (socket.AF_INET, 1), (socket.AF_UNIX, 1), (socket.AF_UNIX, 5)
RINGS = {
    "tcp": {("gRPC", TCP), ("door", TCP), ("door", UNIX)},
    "shm": {("gRPC", TCP), ("door", UNIX)},
}
AT_A_SERVER = {("gRPC", TCP), ("door", TCP), ("desk", SEQPACKET)}
KNOWN = {"gRPC", "door", "desk"}
TURNED_AWAY = " turned away "


class Strangers(ThreadPoolExecutor):
    """One for each port of a job, as soon as it is there."""

    def __init__(self) -> None:
        super().__init__(8)
        self.visits: dict[Port, Future[str]] = {}
        self.almost = Semaphore(0)  # visits of which but the last attempt has been made
        self._before = {port.inode for port in ports_of_all()}  # forks hold some of them for a moment

    def come(self, *jobs: Started) -> int:
        """How many have come by now."""
        for port in ports_of([pid for job in jobs for pid in family_of(job.process.pid)]):
            if port not in self.visits and port.inode not in self._before:
                self.visits[port] = self.submit(kind_of, port, almost=self.almost.release, last=ALL_S)
        return len(self.visits)

    def found(self) -> set[tuple[str, tuple[int, int]]]:
        """Kinds of ports; no other host reaches any of them."""
        told = {str(port): visit.result() for port, visit in self.visits.items()}
        assert {*told.values()} <= {*KNOWN, GONE}, told
        assert all(is_loopback(port.address[0]) for port in self.visits if isinstance(port.address, tuple))
        return {(visit.result(), (port.family, port.type)) for port, visit in self.visits.items()}


@pytest.mark.long
@pytest.mark.parametrize("plane", ["shm", "tcp", pytest.param("grpc", marks=pytest.mark.longest)])
def test_a_stranger_is_refused_at_every_port_of_a_training_by_servers(
    plane: str, start: Callable[..., Started], tmp_path: Path
) -> None:
    pytest.importorskip("paddle")
    command = ["ps.run", "--trainers", 2, "--servers", 1, "--data-plane", plane, "--steps", STEPS, *JOB, "--json"]
    start(*command, tmp_path / "alone.json").ended_well()
    with Strangers() as strangers:
        job = start(*command, tmp_path / "visited.json")
        until(lambda: (strangers.come(job), job.process.poll() is not None)[1], "the end of the training")
    job.ended_well(telling=TURNED_AWAY)
    assert strangers.found() == AT_A_SERVER, "nothing else, and all of these open to the end"
    assert digest_in(tmp_path / "visited.json") == digest_in(tmp_path / "alone.json")


@pytest.mark.long
@pytest.mark.parametrize("backend", RINGS)
def test_a_stranger_is_refused_at_every_port_of_a_training_by_a_ring(
    backend: str, start: Callable[..., Started], tmp_path: Path
) -> None:
    """Whose ports are open while it meets: rank 1 comes when strangers have been at all of rank 0's."""
    pytest.importorskip("paddle")
    flags = ["--nranks", 2, "--backend", backend, "--steps", FEW_STEPS, *JOB, "--json"]
    start("collective.run", *flags, tmp_path / "alone.json").ended_well()
    trainer = ["collective.trainer", "--rendezvous", f"127.0.0.1:{free_port()}", *flags, tmp_path / "visited.json"]
    expected = RINGS[backend]
    with Strangers() as strangers:
        ranks = [start(*trainer, "--rank", 0)]
        until(lambda: strangers.come(*ranks) >= len(expected), "the ports of rank 0")
        for _ in expected:
            assert strangers.almost.acquire(timeout=ALL_S)
        ranks.append(start(*trainer, "--rank", 1))
        until(lambda: (strangers.come(*ranks), ranks[0].process.poll() is not None)[1], "the end of the training")
    for rank in ranks:
        rank.ended_well(telling=TURNED_AWAY)
    assert strangers.found() >= expected
    assert digest_in(tmp_path / "visited.json") == digest_in(tmp_path / "alone.json")


def test_the_kinds_of_ports_are_told_by_how_they_refuse() -> None:
    before = set(ports_of([os.getpid()]))
    name = f"gradsync-test-{os.getpid()}-ports"
    with ParameterServer("127.0.0.1:0", 1), Listener("127.0.0.1", name, with_secret(1)) as listener:
        listener.door.admit({})
        found = [(kind_of(p), (p.family, p.type)) for p in {*ports_of([os.getpid()])} - before]
    kinds = [("desk", SEQPACKET), ("door", TCP), ("door", TCP), ("door", UNIX), ("gRPC", TCP)]
    assert sorted(found) == sorted(kinds)


@pytest.mark.parametrize("closes", [True, False])
def test_a_port_that_closes_during_the_last_attempt_is_gone(closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(ports_of([os.getpid()]))
    with Listener("127.0.0.1", f"gradsync-test-{os.getpid()}-closes", with_secret(1)) as listener:

        def last_attempt(*_: object) -> str:
            if closes:
                listener.close()
            return "nothing"

        listener.door.admit({})
        (port,) = [port for port in {*ports_of([os.getpid()])} - before if port.family == socket.AF_UNIX]
        monkeypatch.setitem(ATTEMPTS, "bytes", last_attempt)
        assert kind_of(port).startswith(GONE if closes else UNKNOWN)


def test_strangers_at_a_server_take_neither_threads_nor_memory() -> None:
    """Silent ones, ones who stop in the middle of a handshake, and ones who send as much as they can."""
    process = psutil.Process()
    with ParameterServer("127.0.0.1:0", 1) as server, ps.connect([server.address], 0, 1) as client:
        client.register(np.zeros(1000, np.float32))
        ports = [p for p in ports_of([os.getpid()]) if p.address == ("127.0.0.1", int(server.address.split(":")[1]))]
        (port,) = ports
        before, threads = process.memory_info().rss, process.num_threads()
        with Crowd([port.address[1]], 200), ThreadPoolExecutor(1) as stranger:
            flood = stranger.submit(lambda: [pour(port) for _ in range(8)])
            for step in range(5):
                gradients = np.full(1000, step, np.float32)
                client.push_pull(gradients)
                assert gradients.tolist() == [step] * 1000
            flood.result()
            assert server.status().state == "training"
            assert process.num_threads() - threads <= MORE_THREADS
            assert process.memory_info().rss - before < MORE_BYTES


def pour(port: Port) -> None:
    """All that the port takes of 16 MiB behind a handshake without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError), port.dial(5.0) as connection, context.wrap_socket(connection) as secured:
        secured.sendall(bytes(16 << 20))


class Talkative(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        return


class Http6(HTTPServer):
    address_family = socket.AF_INET6


@pytest.mark.parametrize("make", [HTTPServer, Http6])
def test_a_port_of_a_new_kind_is_noticed(make: type[HTTPServer]) -> None:
    before = set(ports_of([os.getpid()]))
    with make(("::1" if make is Http6 else "127.0.0.1", 0), Talkative) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            (port,) = {*ports_of([os.getpid()])} - before
            assert kind_of(port, 0.3).startswith(UNKNOWN)
        finally:
            server.shutdown()
            thread.join()


def test_a_port_that_says_nothing_is_of_no_known_kind_and_one_that_has_closed_is_gone() -> None:
    before = set(ports_of([os.getpid()]))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0gradsync-test-{os.getpid()}-silent")
        silent.listen()
        (port,) = {*ports_of([os.getpid()])} - before
        assert kind_of(port, 0.1).startswith(UNKNOWN)
    assert kind_of(port, 0.1) == GONE
