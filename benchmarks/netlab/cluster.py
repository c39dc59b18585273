"""Hosts emulated on this machine: network namespaces joined by a switch, each with a link of limited rate.

    rank 0        rank 1        rank 2
    server 1                    server 0
    10.77.0.1     10.77.0.2     10.77.0.3     a namespace each: its own lo, ports and abstract sockets
        |             |             |         veth pairs; tbf holds both ends to the link's rate
        +-------- the switch -------+         a bridge, in a namespace too, so that nothing is left in the machine's own

Needs root, and ip and tc of iproute2. Namespaces carry the process id in their names; those of a dead process are
removed by the next one.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common.errors import UsageError
from common.launch.ranks import abstract_address
from common.system.process import Terminated

__all__ = ["BIT_UNITS", "Cluster", "ClusterConfig", "Hosts", "OneHost", "quantity", "why_no_cluster"]

NETWORK = "10.77.0"
MOST_HOSTS = 64
PORTS_EACH = 100
FIRST_PORT = 20000  # below the ports that the kernel gives out; nobody else is in the namespaces
BLOCKS = 120  # of PORTS_EACH, up to port 32,000
COMMAND_S = 20.0
NAMESPACE = re.compile(r"gs(\d+)(?:sw|h\d+)\b")
BIT_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
BURST_S, BURST_BYTES = 1e-3, 131_072  # no less than the 64 KiB that TCP hands to a link at once, or tbf cuts them up
QUEUE_S, QUEUE_BYTES = 16e-3, 524_288  # like the buffer of a small switch


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster to be emulated on this machine."""

    hosts: int | None = None
    """Emulate so many hosts on this machine (root only). Rank r runs on host r mod hosts, server s on host (N + s) mod
    hosts (compare: N is the largest --nranks). (default: this machine as it is)"""
    link: str = "1gbit"
    """Rate of each emulated host's link, each way: 100mbit, 1gbit, ..."""
    latency: str | None = None
    """Delay of each emulated link, one way: 0.5ms, 50us, ... (default: what the kernel needs)"""
    slow_host: str | None = None
    """I:Fx: the link of host I is F times slower, as in 2:3x. (default: all are equal)"""
    cores_per_host: int | None = None
    """Pin the ranks and servers of each emulated host to so many cores of its own. (default: all hosts share all)"""

    def __post_init__(self) -> None:
        if self.hosts is None:
            given = {
                "latency": self.latency,
                "slow-host": self.slow_host,
                "link": self.link != ClusterConfig.link,
                "cores-per-host": self.cores_per_host is not None,
            }
            for flag in (flag for flag, value in given.items() if value):
                raise UsageError(f"--{flag} is for emulated hosts; give --hosts too")
        elif not 2 <= self.hosts <= MOST_HOSTS:
            raise UsageError(f"--hosts must be in 2..{MOST_HOSTS} (got {self.hosts})")
        self.links()
        self.delay()
        self.cores()

    def cores(self) -> list[list[int]] | None:
        """The cores of each host, in the order of their numbers; None: all hosts share all."""
        if self.hosts is None or self.cores_per_host is None:
            return None
        each, there = self.cores_per_host, sorted(os.sched_getaffinity(0))
        if each < 1:
            raise UsageError(f"--cores-per-host must be at least 1 (got {each})")
        if (taken := each * self.hosts) > len(there):
            raise UsageError(
                f"--cores-per-host {each} on {self.hosts} hosts needs {taken} cores, this machine has {len(there)}"
            )
        return [there[host * each : (host + 1) * each] for host in range(self.hosts)]

    def links(self) -> list[float]:
        """Bytes per second of every host's link, each way."""
        rate = quantity("link", self.link, BIT_UNITS, "1gbit") / 8
        rates = [rate] * (self.hosts or 0)
        if self.slow_host is not None:
            found = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)x", self.slow_host)
            if not found or int(found[1]) >= len(rates) or float(found[2]) < 1:
                raise UsageError(
                    f"--slow-host must be I:Fx with a host in 0..{len(rates) - 1}, as in 1:3x (got {self.slow_host!r})"
                )
            rates[int(found[1])] /= float(found[2])
        return rates

    def delay(self) -> float:
        """Seconds that each link delays what a host sends."""
        return quantity("latency", self.latency, TIME_UNITS, "0.5ms") if self.latency else 0.0

    def slowest(self) -> tuple[int, int]:
        """The host with the slowest link, and another one."""
        links = self.links()
        host = links.index(min(links))
        return host, (host + 1) % len(links)

    def ring_seconds(self, nbytes: int, rate: float, nranks: int) -> float:
        """The least time of an all-reduce: with one rank a host and equal links 2(N-1)/N M/B.

        Args:
            rate: B, bytes/s that the slowest link was found to carry; the others do as their rates say.
        """
        share = 2 * (nranks - 1) / nranks * nbytes
        return self._seconds([(rank, (rank + 1) % nranks, share) for rank in range(nranks)], rate)

    def broadcast_seconds(self, nbytes: int, rate: float, nranks: int) -> float:
        """The least time of a broadcast from rank 0: M/B, for every other host with a rank must receive all of it."""
        reached = min(nranks, len(self.links()))
        return self._seconds([(host, host + 1, nbytes) for host in range(reached - 1)], rate)

    def round_seconds(
        self, nbytes: int, rate: float, nranks: int, servers: int, *, first_server: int | None = None
    ) -> float:
        """The least time in which every rank pushes M bytes to S servers and pulls M, both at once: with a host for
        each, and equal links, max(M/B, N M/(S B)).

        Args:
            first_server: its host; by default the one after the last rank's.
        """
        first = nranks if first_server is None else first_server
        pairs = [(rank, first + server) for rank in range(nranks) for server in range(servers)]
        return self._seconds(
            [each for r, s in pairs for each in ((r, s, nbytes / servers), (s, r, nbytes / servers))], rate
        )

    def _seconds(self, traffic: Sequence[tuple[int, int, float]], rate: float) -> float:
        """The least time for (from host, to host, bytes): of the busiest direction of the busiest link. What stays on a
        host is free."""
        links = self.links()
        sent, received = [0.0] * len(links), [0.0] * len(links)
        for source, target, nbytes in traffic:
            if (source - target) % len(links):
                sent[source % len(links)] += nbytes
                received[target % len(links)] += nbytes
        rates = [rate * link / min(links) for link in links]
        return max(max(s, r) / each for s, r, each in zip(sent, received, rates, strict=True))

    def describe(self) -> dict[str, Any] | None:
        """For results; None without emulated hosts."""
        if self.hosts is None:
            return None
        control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        return {
            "words": self.in_words(),
            "hosts": self.hosts,
            "links_bytes_per_s": self.links(),
            "delay_s": self.delay(),
            "cores_per_host": self.cores_per_host,
            "congestion_control": control,
        }

    def in_words(self) -> str:
        if self.hosts is None:
            return ""
        late = f", {self.latency} late" if self.latency else ""
        slow = f", host {self.slow_host.replace(':', ' ')} slower" if self.slow_host else ""
        own = f", {self.cores_per_host} core{'s' * (self.cores_per_host > 1)} each" if self.cores_per_host else ""
        return f"{self.hosts} hosts, {self.link}{late}{slow}{own}"

    def make(self) -> Hosts:
        """What the flags ask for, to be entered."""
        return OneHost() if self.hosts is None else Cluster(self.links(), delay=self.delay(), cores=self.cores())


def quantity(flag: str, text: str, units: dict[str, Any], example: str) -> float:
    """A flag's number and unit.

    Raises:
        UsageError: it is none, or zero.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    if not found or found[2] not in units or not float(found[1]):
        raise UsageError(f"--{flag} must be a number and {', '.join(units)}, as in {example} (got {text!r})")
    return float(found[1]) * float(units[found[2]])


class Hosts(Protocol):
    """Where processes run; host i is counted modulo their number. A context manager."""

    emulated: bool
    environment: dict[str, str]  # for processes on them

    def __enter__(self) -> Hosts: ...

    def __exit__(self, *_: object) -> None: ...

    def within(self, host: int) -> list[str]:
        """The command that starts another one there, before that one."""

    def address(self, host: int) -> str:
        """By which the other hosts reach it."""

    def endpoints(self, hosts: Sequence[int]) -> list[str]:
        """A free HOST:PORT on each."""

    def meeting_place(self) -> str:
        """A rendezvous on host 0."""


_blocks = itertools.count(secrets.randbelow(BLOCKS))  # other programs of ours most likely begin elsewhere


class OneHost:
    """This machine as it is."""

    emulated = False
    environment: dict[str, str] = {}  # noqa: RUF012 - Protocol's

    def __enter__(self) -> OneHost:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def within(self, host: int) -> list[str]:  # noqa: ARG002
        return []

    def address(self, host: int) -> str:  # noqa: ARG002
        return "127.0.0.1"

    def endpoints(self, hosts: Sequence[int]) -> list[str]:
        """Whoever gets one may use the next PORTS_EACH too: they lie below those that the kernel gives to outgoing
        connections, of which other libraries have many."""
        return [f"127.0.0.1:{free_block()}" for _ in hosts]

    def meeting_place(self) -> str:
        return abstract_address("benchmarks")


class Cluster:
    """Emulated hosts 10.77.0.1, 10.77.0.2, ...: there while the context manager is entered, however it is left.

    Args:
        links: bytes/s of each host's link, each way; 0: unlimited.
        delay: seconds by which each link delays what its host sends.
        cores: of each host, to which its processes are pinned; None: they share all.

    Raises:
        UsageError: this machine cannot, and why.
    """

    emulated = True
    environment = {"GLOO_SOCKET_IFNAME": "eth0"}  # noqa: RUF012 - Protocol's

    def __init__(
        self, links: Sequence[float], *, delay: float = 0.0, cores: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.links, self.delay, self.cores = list(links), delay, cores
        self.names = [f"gs{os.getpid()}h{host}" for host in range(len(links))]
        self._switch = f"gs{os.getpid()}sw"
        self._ports = [itertools.count(FIRST_PORT, PORTS_EACH) for _ in links]

    def __enter__(self) -> Cluster:
        if reason := why_no_cluster():
            raise UsageError(reason)
        if self.cores and shutil.which("taskset") is None:
            raise UsageError("--cores-per-host needs taskset (apt-get install util-linux)")
        remove_namespaces_of_the_dead()
        self._previous = signal.signal(signal.SIGTERM, _exit_on_sigterm)
        try:
            for command in self.commands():
                _run(command)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for name in [*self.names, self._switch]:
                _remove(name)
        finally:
            signal.signal(signal.SIGINT, handlers[signal.SIGINT])
            signal.signal(signal.SIGTERM, self._previous)

    def commands(self) -> list[list[str]]:
        """What builds it."""
        found = []
        for name in [self._switch, *self.names]:
            found += [f"ip netns add {name}", f"ip -n {name} link set lo up"]
        found += [f"ip -n {self._switch} link add switch type bridge", f"ip -n {self._switch} link set switch up"]
        for host, (name, rate) in enumerate(zip(self.names, self.links, strict=True)):
            port = f"port{host}"
            found += [
                f"ip link add eth0 netns {name} type veth peer name {port} netns {self._switch}",
                f"ip -n {self._switch} link set {port} master switch up",
                f"ip -n {name} addr add {self.address(host)}/24 dev eth0",
                f"ip -n {name} link set eth0 up",
                *_limits(name, "eth0", rate, self.delay),
                *_limits(self._switch, port, rate, 0.0),
            ]
        return [command.split() for command in found]

    def limit(self, links: Sequence[float]) -> None:
        """Change the rates of the links, bytes/s and none of them 0, of a cluster that was entered with limits."""
        self.links = list(links)
        for host, (name, rate) in enumerate(zip(self.names, self.links, strict=True)):
            ends = [*_limits(name, "eth0", rate, self.delay), *_limits(self._switch, f"port{host}", rate, 0.0)]
            for command in ends:
                _run(command.replace(" add ", " change ").split())

    def within(self, host: int) -> list[str]:
        number = host % len(self.names)
        pinned = ["taskset", "-c", ",".join(map(str, self.cores[number]))] if self.cores else []
        return ["ip", "netns", "exec", self.names[number], *pinned]

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host % len(self.links) + 1}"

    def endpoints(self, hosts: Sequence[int]) -> list[str]:
        """Whoever gets one may use the next PORTS_EACH too."""
        return [f"{self.address(host)}:{next(self._ports[host % len(self._ports)])}" for host in hosts]

    def meeting_place(self) -> str:
        return self.endpoints([0])[0]


def free_block() -> int:
    """The first of PORTS_EACH ports of this machine's loopback that nobody uses now, nor was given before.

    Raises:
        UsageError: there is none.
    """
    for _ in range(BLOCKS):
        first = FIRST_PORT + next(_blocks) % BLOCKS * PORTS_EACH
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + PORTS_EACH):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    last = FIRST_PORT + BLOCKS * PORTS_EACH - 1
    raise UsageError(f"no {PORTS_EACH} free ports in a row between {FIRST_PORT} and {last}; end what listens there")


def why_no_cluster() -> str:
    """Why hosts cannot be emulated here, and what mends it; "" if they can."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"emulated hosts need {' and '.join(missing)} (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "emulated hosts need root, for network namespaces: run as root (sudo)"
    return ""


def _limits(namespace: str, device: str, rate: float, delay: float) -> list[str]:
    """tbf holds the rate; netem, around it, delays."""
    add = f"tc -n {namespace} qdisc add dev {device}"
    found = [f"{add} root handle 1: netem delay {delay * 1e6:.0f}us limit 10000"] if delay else []
    if rate:
        burst, queue = max(rate * BURST_S, BURST_BYTES), max(rate * QUEUE_S, QUEUE_BYTES)
        where = "parent 1:1 handle 10:" if delay else "root"
        found.append(f"{add} {where} tbf rate {rate * 8:.0f}bit burst {burst:.0f} limit {queue:.0f}")
    return found


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        kind = next((word for word in ("netem", "tbf", "bridge", "veth") if word in command), "namespaces")
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UsageError(
            f"this kernel or container cannot emulate hosts, for want of {kind}: {' '.join(command)}: {said}"
        )


def remove_namespaces_of_the_dead() -> None:
    """Of runs that were killed before they could."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    for found in NAMESPACE.finditer(listed.stdout):
        if not Path("/proc", found[1]).exists():
            _remove(found[0])


def _remove(namespace: str) -> None:
    """What is in it goes with it, once no process is left there."""
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=COMMAND_S, check=False)


def _exit_on_sigterm(*_: object) -> None:
    raise Terminated
