"""Emulated hosts: what the flags say, the bounds of a round, and namespaces that are gone however a run ends."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.netlab.cluster import Cluster, why_no_cluster
from benchmarks.netlab.config import ClusterConfig
from benchmarks.netlab.hosts import FIRST_PORT, PORTS_EACH, OneHost
from common.errors import UsageError
from tests.support.groups import LEAST_OF_LINK
from tests.support.typed_results import load

needs_cluster = pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster() or "-")
M, B = 48_000_000, 125e6


def test_links_and_delays() -> None:
    found = ClusterConfig(hosts=3, link="100mbit", latency="0.5ms", slow_host="1:4x")
    assert found.links() == pytest.approx([12.5e6, 3.125e6, 12.5e6])
    assert found.delay() == pytest.approx(5e-4)
    assert found.slowest() == (1, 2)
    assert found.in_words() == "3 hosts, 100mbit, 0.5ms late, host 1 4x slower"
    assert ClusterConfig(hosts=2, link="2.5gbit").slowest() == (0, 1)
    assert isinstance(ClusterConfig().make(), OneHost)
    assert ClusterConfig().describe() is None


def test_ports_of_one_host_come_in_blocks_that_nobody_else_is_given() -> None:
    endpoints = OneHost().endpoints(range(5))
    ports = [int(endpoint.removeprefix("127.0.0.1:")) for endpoint in endpoints]
    assert len({port // PORTS_EACH for port in ports}) == 5
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(FIRST_PORT <= port <= port + PORTS_EACH <= lowest for port in ports)


def test_a_block_with_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first = int(OneHost().endpoints([0])[0].rpartition(":")[2])
    at = (first - FIRST_PORT) // PORTS_EACH
    monkeypatch.setattr("benchmarks.netlab.hosts._blocks", itertools.count(at))
    with socket.create_server(("127.0.0.1", first + 7)):
        assert OneHost().endpoints([0]) != [f"127.0.0.1:{first}"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"hosts": 1}, "--hosts must be in 2..64 (got 1)"),
        ({"latency": "1ms"}, "--latency is for emulated hosts; give --hosts too"),
        ({"slow_host": "1:2x"}, "--slow-host is for emulated hosts; give --hosts too"),
        ({"cores_per_host": 1}, "--cores-per-host is for emulated hosts; give --hosts too"),
        ({"hosts": 2, "cores_per_host": 0}, "--cores-per-host must be at least 1 (got 0)"),
        ({"hosts": 3, "cores_per_host": 2}, "--cores-per-host 2 on 3 hosts needs 6 cores, this machine has 5"),
        ({"link": "10gbit"}, "--link is for emulated hosts; give --hosts too"),
        ({"hosts": 2, "link": "1GB"}, "--link must be a number and kbit, mbit, gbit, as in 1gbit (got '1GB')"),
        ({"hosts": 2, "link": "0mbit"}, "as in 1gbit (got '0mbit')"),
        ({"hosts": 2, "latency": "fast"}, "--latency must be a number and us, ms, s, as in 0.5ms (got 'fast')"),
        ({"hosts": 2, "slow_host": "2:3x"}, "--slow-host must be I:Fx with a host in 0..1, as in 1:3x (got '2:3x')"),
        ({"hosts": 2, "slow_host": "1:0.5x"}, "(got '1:0.5x')"),
    ],
)
def test_flags_that_cannot_be(flags: dict[str, object], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 3, 5, 6, 7})
    with pytest.raises(UsageError) as caught:
        ClusterConfig(**flags)  # type: ignore[arg-type]
    assert text in str(caught.value)


def test_each_host_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {7, 2, 3, 5, 6})
    found = ClusterConfig(hosts=2, cores_per_host=2)
    assert found.cores() == [[2, 3], [5, 6]]
    assert found.in_words() == "2 hosts, 1gbit, 2 cores each"
    described = found.describe()
    assert described
    assert described.cores_per_host == 2
    hosts = found.make()
    assert [" ".join(hosts.within(host)).split(" ", 4)[4] for host in range(3)] == [
        "taskset -c 2,3",
        "taskset -c 5,6",
        "taskset -c 2,3",
    ]
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "taskset" else f"/sbin/{tool}")
    with pytest.raises(UsageError, match=r"^--cores-per-host needs taskset \(apt-get install util-linux\)$"):
        hosts.__enter__()


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_a_ring_moves_each_byte_twice_but_for_a_share(nranks: int) -> None:
    found = ClusterConfig(hosts=max(2, nranks)).ring_seconds(M, B, nranks)
    assert found == pytest.approx(2 * (nranks - 1) / nranks * M / B)


@pytest.mark.parametrize("nranks", [2, 4, 6])
def test_a_broadcast_reaches_each_host_once(nranks: int) -> None:
    assert ClusterConfig(hosts=4).broadcast_seconds(M, B, nranks) == pytest.approx(M / B)
    slow = ClusterConfig(hosts=4, slow_host="2:3x")  # B is what its link carries
    assert slow.broadcast_seconds(M, B, nranks) == pytest.approx(M / B / (3 if nranks == 2 else 1))


@pytest.mark.parametrize(("nranks", "servers"), [(4, 1), (4, 2), (4, 4), (2, 4)])
def test_servers_on_hosts_of_their_own(nranks: int, servers: int) -> None:
    found = ClusterConfig(hosts=nranks + servers).round_seconds(M, B, nranks, servers)
    assert found == pytest.approx(max(M / B, nranks * M / (servers * B)))


def test_as_many_servers_as_ranks_beside_them_are_as_good_as_a_ring() -> None:
    cluster = ClusterConfig(hosts=4)
    assert cluster.round_seconds(M, B, 4, 4) == pytest.approx(cluster.ring_seconds(M, B, 4))


def test_a_slow_host_bounds_all() -> None:
    cluster = ClusterConfig(hosts=3, slow_host="2:3x")  # the server's
    assert cluster.round_seconds(M, B, 2, 1) == pytest.approx(2 * M / B)  # B is what the slowest link carries
    assert ClusterConfig(hosts=3, slow_host="0:3x").round_seconds(M, B, 2, 1) == pytest.approx(M / B)


def test_ranks_of_one_host_need_no_link() -> None:
    assert ClusterConfig(hosts=2).round_seconds(M, B, 4, 1) == pytest.approx(2 * M / B)  # two of four live beside it


def test_both_ends_of_a_link_are_limited_and_what_a_host_sends_is_delayed() -> None:
    cluster = Cluster([125e6, 12.5e6], delay=5e-4)
    host, switch = cluster.names[1], f"gs{os.getpid()}sw"
    assert [" ".join(c) for c in cluster.commands() if c[0] == "tc"][2:] == [
        "tc -n gs1sw qdisc add dev port0 root tbf rate 1000000000bit burst 131072 limit 2000000".replace(
            "gs1sw", switch
        ),
        f"tc -n {host} qdisc add dev eth0 root handle 1: netem delay 500us limit 10000",
        f"tc -n {host} qdisc add dev eth0 parent 1:1 handle 10: tbf rate 100000000bit burst 131072 limit 524288",
        f"tc -n {switch} qdisc add dev port1 root tbf rate 100000000bit burst 131072 limit 524288",
    ]
    assert not [c for c in Cluster([0, 0]).commands() if c[0] == "tc"]


@needs_cluster
@pytest.mark.processes
def test_limits_can_be_changed() -> None:
    def rates() -> list[str]:
        there = [("eth0", cluster.names[0]), ("eth0", cluster.names[1]), ("port0", switch), ("port1", switch)]
        return [re.search(r"qdisc tbf .* rate (\S+)", shown(*ends)).group(1) for ends in there]  # type: ignore[union-attr]

    def shown(device: str, namespace: str) -> str:
        command = ["tc", "-n", namespace, "qdisc", "show", "dev", device]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout

    with Cluster([12.5e6, 25e6]) as cluster:
        switch = f"gs{os.getpid()}sw"
        assert rates() == ["100Mbit", "200Mbit"] * 2
        cluster.limit([50e6, 125e6])
        assert rates() == ["400Mbit", "1Gbit"] * 2


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    for need in ("root, for network namespaces: run as root (sudo)", "tc (apt-get install iproute2)"):
        with pytest.raises(UsageError) as caught:
            Cluster([0, 0]).__enter__()
        assert str(caught.value) == f"emulated hosts need {need}"
        monkeypatch.setattr("shutil.which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=20).stdout
    return [name for name in listed.split() if name.startswith(f"gs{pid}")]


@needs_cluster
def test_a_kernel_that_cannot_is_one_line_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster([0, 0])
    commands = [
        *cluster.commands(),
        ["tc", "-n", cluster.names[0], "qdisc", "add", "dev", "eth0", "root", "tbf", "rats"],
    ]
    monkeypatch.setattr(cluster, "commands", lambda: commands)
    with pytest.raises(
        UsageError, match=r"^this kernel or container cannot emulate hosts, for want of tbf: tc .* rats: "
    ):
        cluster.__enter__()
    assert namespaces(os.getpid()) == []


@needs_cluster
@pytest.mark.processes
def test_hosts_reach_each_other_and_themselves() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with Cluster([12.5e6] * 3) as cluster:
        assert len(namespaces(os.getpid())) == 4
        here, there = cluster.endpoints([4, 2])
        assert (here.rpartition(":")[0], there.rpartition(":")[0]) == ("10.77.0.2", "10.77.0.3")
        for host, address in [(2, here), (1, here), (0, f"127.0.0.1:{here.rpartition(':')[2]}")]:
            serving = 0 if "127" in address else 1
            assert echoed(cluster, serving, host, address) == "hello"
    assert namespaces(os.getpid()) == []
    assert signal.getsignal(signal.SIGTERM) == handler


def echoed(cluster: Cluster, server: int, client: int, address: str) -> str:
    host, _, port = address.rpartition(":")
    serve = (
        f"import socket; listener = socket.create_server(({host!r}, {port})); print('up', flush=True); "
        "listener.accept()[0].sendall(b'hello')"
    )
    ask = f"import socket; print(socket.create_connection(({host!r}, {port}), 10).recv(9).decode())"
    with subprocess.Popen([*cluster.within(server), sys.executable, "-c", serve], stdout=subprocess.PIPE) as serving:
        try:
            assert serving.stdout
            assert serving.stdout.readline() == b"up\n"
            command = [*cluster.within(client), sys.executable, "-c", ask]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
        finally:
            serving.kill()


HOLD = """
import time
from benchmarks.netlab.cluster import Cluster
with Cluster([0, 0]):
    print("up", flush=True)
    time.sleep(60)
"""


@needs_cluster
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_namespaces_go_with_their_process(number: signal.Signals, wait_until: Callable[..., None]) -> None:
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        assert len(namespaces(process.pid)) == 3
        process.send_signal(number)
        process.wait(20)
    if number == signal.SIGKILL:
        assert len(namespaces(process.pid)) == 3
        with Cluster([0, 0]):
            pass
    assert namespaces(process.pid) == []


@needs_cluster
@pytest.mark.processes
@pytest.mark.parametrize(
    ("op", "backends"),
    [("all_reduce", ["tcp", "ring-limit"]), pytest.param("push_pull", ["ps-grpc"], marks=pytest.mark.longest)],
)
@pytest.mark.long
def test_a_sweep_between_hosts(op: str, backends: list[str], tmp_path: Path) -> None:
    flags = ["--hosts", "3", "--link", "200mbit", "--nranks", "2,3", "--sizes", "64KiB,2MB", "--servers", "2"]
    few = [
        "--op",
        op,
        "--backends",
        ",".join(backends),
        "--repetitions",
        "1",
        "--seconds",
        "0.01",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "sweep", *flags, *few],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert found["cluster"]["links_bytes_per_s"] == [25e6] * 3
    rows = found["rows"]
    assert [row["backend"] for row in rows] == ["link", *backends * 2] * 2
    assert all(row["wrong"] == 0 for row in rows)
    for row in rows:
        if row["backend"] == "link":
            assert LEAST_OF_LINK < row["algbw_gb_s"] / 0.025 < 1.0
        elif row["bytes"] == 2_000_000:
            assert 0.01 < row["of_limit"] < 1.15  # what a link passes at once counts for something in 2 MB
    assert "on 3 hosts, 200mbit" in " ".join(done.stdout.split())
    assert "emulated 3 hosts, 200mbit" in (tmp_path / "sweep.md").read_text()


@needs_cluster
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
@pytest.mark.processes
@pytest.mark.longest
def test_hosts_pinned_to_cores_of_their_own(tmp_path: Path) -> None:
    there = sorted(os.sched_getaffinity(0))
    script = "import os; print(os.sched_getaffinity(0))"
    with ClusterConfig(hosts=2, cores_per_host=1).make() as cluster:
        for host in range(2):
            command = [*cluster.within(host), sys.executable, "-c", script]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
            assert done.stdout == f"{{{there[host]}}}\n"
    flags = ["--hosts", "2", "--cores-per-host", "1", "--nranks", "2", "--backends", "tcp", "--sizes", "64KiB"]
    few = ["--repetitions", "1", "--seconds", "0.01", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks", "sweep", *flags, *few]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert "on 2 hosts, 1gbit, 1 core each" in " ".join(done.stdout.split())
    assert load(tmp_path / "sweep.json")["cluster"]["cores_per_host"] == 1


def test_backends_that_hosts_have_not_are_named() -> None:
    from benchmarks.flags.sweep import SweepConfig

    with pytest.raises(UsageError, match=r"^backend shm cannot be measured for all_reduce on emulated hosts"):
        SweepConfig(backends="tcp,shm", cluster=ClusterConfig(hosts=2))
    assert SweepConfig(cluster=ClusterConfig(hosts=2)).names() == ["tcp", "gloo", "torch-gloo", "ring-limit"]
    assert "link" not in SweepConfig().names()
