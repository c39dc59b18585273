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
import shutil
import signal
import subprocess
from collections.abc import Sequence

import psutil

from benchmarks.netlab.hosts import FIRST_PORT, PORTS_EACH
from common.errors import UsageError
from common.system.process import Terminated

__all__ = ["Cluster", "run", "why_no_cluster"]

NETWORK = "10.77.0"
NOBODY = "02:00:00:00:00:01"
COMMAND_S = 20.0
NAMESPACE = re.compile(r"gs(\d+)(?:sw|h\d+)\b")
BURST_S, BURST_BYTES = 1e-3, 131_072  # no less than the 64 KiB that TCP hands to a link at once, or tbf cuts them up
QUEUE_S, QUEUE_BYTES = 16e-3, 524_288  # like the buffer of a small switch


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
        self.switch = f"gs{os.getpid()}sw"
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
                run(command)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for name in [*self.names, self.switch]:
                _remove(name)
        finally:
            signal.signal(signal.SIGINT, handlers[signal.SIGINT])
            signal.signal(signal.SIGTERM, self._previous)

    def commands(self) -> list[list[str]]:
        """What builds it."""
        found = []
        for name in [self.switch, *self.names]:
            found += [f"ip netns add {name}", f"ip -n {name} link set lo up"]
        found += [f"ip -n {self.switch} link add switch type bridge", f"ip -n {self.switch} link set switch up"]
        for host, (name, rate) in enumerate(zip(self.names, self.links, strict=True)):
            port = f"port{host}"
            found += [
                f"ip link add eth0 netns {name} type veth peer name {port} netns {self.switch}",
                f"ip -n {self.switch} link set {port} master switch up",
                f"ip -n {name} addr add {self.address(host)}/24 dev eth0",
                f"ip -n {name} link set eth0 up",
                *_limits(name, "eth0", rate, self.delay),
                *_limits(self.switch, port, rate, 0.0),
            ]
        return [command.split() for command in found]

    def unplug(self, host: int) -> None:
        """Cut a host's link at the switch, which its own end does not notice."""
        run(f"ip -n {self.switch} link set port{host} nomaster".split())

    def plug(self, host: int) -> None:
        """Put it together again."""
        run(f"ip -n {self.switch} link set port{host} master switch".split())

    def mute(self, host: int) -> None:
        """What a host sends arrives nowhere any more, which it does not notice; what others send it does arrive."""
        for other in self._others(host):
            self._misdirect(host, other)

    def deafen(self, host: int) -> None:
        """The other way round: nothing arrives at this host any more."""
        for other in self._others(host):
            self._misdirect(other, host)

    def mend(self, host: int) -> None:
        """After `mute` or `deafen`."""
        for other in self._others(host):
            for one, another in ((host, other), (other, host)):
                run(f"ip -n {self.names[one]} neigh flush to {self.address(another)} dev eth0 nud all".split())

    def _others(self, host: int) -> list[int]:
        return [other for other in range(len(self.names)) if other != host]

    def _misdirect(self, sender: int, receiver: int) -> None:
        """To an Ethernet address that nobody has."""
        where = f"to {self.address(receiver)} lladdr {NOBODY} dev eth0 nud permanent"
        run(f"ip -n {self.names[sender]} neigh replace {where}".split())

    def limit(self, links: Sequence[float]) -> None:
        """Change the rates of the links, bytes/s and none of them 0, of a cluster that was entered with limits."""
        self.links = list(links)
        for host, (name, rate) in enumerate(zip(self.names, self.links, strict=True)):
            ends = [*_limits(name, "eth0", rate, self.delay), *_limits(self.switch, f"port{host}", rate, 0.0)]
            for command in ends:
                run(command.replace(" add ", " change ").split())

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


def run(command: Sequence[str]) -> None:
    """
    Raises:
        UsageError: it failed, and what this machine lacks.
    """
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
        if not psutil.pid_exists(int(found[1])):
            _remove(found[0])


def _remove(namespace: str) -> None:
    """What is in it goes with it, once no process is left there."""
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=COMMAND_S, check=False)


def _exit_on_sigterm(*_: object) -> None:
    raise Terminated
