"""The hosts of a job: the flags that name them, this one's place among them, and its ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from common.credentials.credentials import CredentialFlags, current
from common.errors import GradSyncError, RecoveryFailed, UsageError
from common.launch.job import Job
from common.launch.ranks import endpoints_of, paddle_environment
from common.launch.settings import check_rank
from common.system.addresses import address_after, address_of, is_ours, own_host, parse_address

if TYPE_CHECKING:
    from common.launch.lobby import Company
    from common.network.message_stream import MessageStream

__all__ = ["HostsConfig", "Node", "Place", "command_of", "find_place", "start_rank"]

START = Path(__file__).parents[1] / "program" / "start.py"
RANKS_EACH = 2  # on a host, if nothing is said
PORT = 8600  # of the first host, where no --master is given


@dataclass(frozen=True, kw_only=True)
class HostsConfig(CredentialFlags):
    """For several hosts, start the same command on each; ranks are numbered host by host."""

    devices: Annotated[str | None, tyro.conf.arg(aliases=("--gpus",))] = None
    """GPUs of each host, as in 0,1, with a rank for each; where Paddle is built for CPUs they only count the ranks."""
    nproc_per_node: int | None = None
    """Number of ranks on each host. (default: as many as --devices, else 2)"""
    ips: str | None = None
    """Addresses of all hosts, separated by commas, in the order of their ranks."""
    master: str | None = None
    """HOST:PORT on the first host, where all meet; the next ports are used too. (default: port 8600 of the first --ips)
    """
    nnodes: int | None = None
    """Number of hosts. (default: as many as --ips, else 1)"""
    node_rank: int | None = None
    """Which host this is, 0..nnodes-1. (default: the one of --ips that is an address of this machine)"""
    host_wait: float = 0.0
    """With --max-restarts: how many seconds longer than else to wait for a host that is gone, at which, or at another
    in its place, the same command with its --node-rank is to be started."""

    spares: int = 0
    """With --max-restarts: how many further hosts, with --node-rank nnodes and on, wait to take the place of one that
    is lost, other than the first."""

    def __post_init__(self) -> None:
        if self.spares < 0:
            raise UsageError(f"--spares must be at least 0 (got {self.spares})")
        if self.spares and self.ips is not None:
            raise UsageError(
                "--spares needs --master and --nnodes, not --ips, by which no other can take a host's place"
            )
        if self.spares and self.count == 1:
            raise UsageError("--spares is of several hosts (--nnodes)")
        if not 0 <= self.host_wait < float("inf"):
            raise UsageError(f"--host-wait must be a number of seconds, at least 0 (got {self.host_wait})")
        if self.host_wait and self.count == 1:
            raise UsageError("--host-wait is of several hosts (--nnodes or --ips)")
        for flag, value in (("nproc-per-node", self.nproc_per_node), ("nnodes", self.nnodes)):
            if value is not None and value < 1:
                raise UsageError(f"--{flag} must be at least 1 (got {value})")
        if self.devices is not None and not all(device.isdigit() for device in listed(self.devices)):
            raise UsageError(f"--devices must be numbers separated by commas, as in 0,1 (got {self.devices!r})")
        if self.ips is not None and not all(listed(self.ips)):
            raise UsageError(f"--ips must be addresses separated by commas, as in 10.0.0.1,10.0.0.2 (got {self.ips!r})")
        if self.ips is not None and self.nnodes not in (None, self.count):
            raise UsageError(f"--nnodes {self.nnodes} contradicts --ips, which lists {self.count}; leave --nnodes out")
        if self.master is not None:
            parse_address(self.master)
        if self.count > 1 and self.ips is None:
            if self.master is None:
                raise UsageError(f"--nnodes {self.nnodes} needs --master HOST:PORT, where the hosts meet, or --ips")
            if self.node_rank is None:
                raise UsageError(f"--nnodes {self.nnodes} needs --node-rank 0..{self.count - 1}: which host is this?")
        last = self.count + self.spares - 1
        if self.node_rank is not None and not 0 <= self.node_rank <= last:
            more = f", and {self.spares} of --spares" if self.spares else ""
            raise UsageError(f"--node-rank {self.node_rank} is outside 0..{last}; --nnodes says how many{more}")

    @property
    def count(self) -> int:
        """How many hosts take part."""
        return len(listed(self.ips)) if self.ips is not None else self.nnodes or 1

    @property
    def meeting_place(self) -> str:
        """HOST:PORT on the first host; "" if it is the only one."""
        if self.count == 1:
            return ""
        return self.master or address_of(listed(self.ips)[0], PORT)

    def ranks_each(self, nranks: int | None) -> int:
        """How many ranks a host has, of `nranks` in all (None: not said).

        Raises:
            UsageError: the flags contradict each other, or `nranks` cannot be divided equally.
        """
        said: dict[str, int] = {}
        if nranks is not None:
            check_rank(0, nranks)
            if nranks % self.count:
                raise UsageError(f"--nranks {nranks} cannot be divided equally among {self.count} hosts")
            said[f"--nranks {nranks}"] = nranks // self.count
        if self.devices is not None:
            said[f"--devices {self.devices}"] = len(listed(self.devices))
        if self.nproc_per_node is not None:
            said[f"--nproc-per-node {self.nproc_per_node}"] = self.nproc_per_node
        if len(set(said.values())) > 1:
            ranks = " and ".join(f"{flag} ({each} on each host)" for flag, each in said.items())
            raise UsageError(f"the flags contradict each other: {ranks}; give one of them")
        each = next(iter(said.values()), RANKS_EACH)
        check_rank(0, each * self.count)
        return each

    def position(self) -> int:
        """Which of the hosts this is.

        Raises:
            UsageError: not exactly one of --ips is ours.
        """
        if self.node_rank is not None or self.ips is None:
            return self.node_rank or 0
        ours = [index for index, host in enumerate(listed(self.ips)) if is_ours(host)]
        if len(ours) != 1:
            raise UsageError(
                f"{len(ours) or 'none'} of --ips {self.ips} are addresses of this machine, where one must be; "
                f"say which host this is with --node-rank 0..{self.count - 1}"
            )
        return ours[0]

    def selected_devices(self) -> tuple[str, ...]:
        """What Paddle calls a device: its place among those that CUDA_VISIBLE_DEVICES leaves visible.

        Raises:
            UsageError: a device is not visible.
        """
        devices, visible = listed(self.devices), listed(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
        if visible in ([""], ["all"]):
            return tuple(devices)
        if hidden := [device for device in devices if device not in visible]:
            raise UsageError(f"--devices {','.join(hidden)}: not among CUDA_VISIBLE_DEVICES={','.join(visible)}")
        return tuple(str(visible.index(device)) for device in devices)


@dataclass(frozen=True)
class Node:
    """This host's part in a job."""

    index: int
    nnodes: int
    meeting_place: str  # HOST:PORT on the first host; "" if this is the only one
    endpoints: tuple[str, ...]  # of all ranks
    devices: tuple[str, ...] = ()  # one for each rank of this host; or none
    launchers_meet: str = ""  # HOST:PORT on the first host, if there are others
    named: bool = False  # the hosts' names were given, so that no other can take the place of one
    epoch: int = 0  # that the job had when the launchers met last

    @property
    def nranks(self) -> int:
        return len(self.endpoints)

    @property
    def ranks(self) -> range:
        """Those of this host."""
        return self.ranks_of(self.index)

    def ranks_of(self, host: int) -> range:
        each = self.nranks // self.nnodes
        return range(host * each, (host + 1) * each)

    def environment(self, rank: int) -> dict[str, str]:
        """What Paddle's launcher would tell that rank of this host."""
        environment = paddle_environment(rank, self.endpoints, nnodes=self.nnodes)
        if self.devices:
            environment["FLAGS_selected_gpus"] = self.devices[rank - self.ranks[0]]
        return environment


@dataclass
class Place:
    """This host's part in a job that is started again after a failure, when another host may have taken the place of
    one that was lost.

    Args:
        company: the launchers of all hosts; None: this is the only one, or they need not meet.
        timeout: how long to wait for those of the others, in seconds.
        waits: whether one that is gone is waited for, which is said then.
    """

    node: Node
    timeout: float
    waits: bool = False
    company: Company | None = None

    def agree(self, epoch: int) -> int:
        """The greatest epoch that a launcher of this job's hosts proposes, this one the given; blocks until all have
        proposed theirs, at most `timeout` seconds.

        Raises:
            UsageError: not all have by then.
        """
        self._say_who_may_come()
        self._tell_others()
        self.meet(epoch, self.timeout)
        return self.node.epoch

    def meet_again(self, epoch: int, cause: str) -> None:
        """In that epoch, which all know, because of that; while the ranks of those that are not gone live.

        Raises:
            RecoveryFailed: not all have come within `timeout` seconds, or one in a later epoch.
        """
        self._say_who_may_come()
        try:
            self.meet(epoch, self.timeout)
        except GradSyncError as exc:
            raise RecoveryFailed(f"{cause}; then the launchers of all hosts did not meet: {exc}") from exc
        if self.node.epoch != epoch:
            raise RecoveryFailed(
                f"{cause}; then a launcher has come in epoch {self.node.epoch}, the others in epoch {epoch}"
            )

    def stream(self, host: int) -> MessageStream:
        """That with this host's launcher, or, on other hosts than the first, with that."""
        assert self.company
        return self.company.stream(host)

    def _say_who_may_come(self) -> None:
        if self.waits:
            print(
                f"the launchers of all {self.node.nnodes} hosts meet, for which this one waits {self.timeout:g} s; in "
                "the place of one that is gone start the same command, with its --node-rank",
                file=sys.stderr,
            )

    def _tell_others(self) -> None:
        """That all are started again: one that waits for processes of this host has seen nothing fail yet."""
        if self.company is None:
            return
        from common.launch.crew_messages import Order, Report, send

        life, index = self.node.epoch, self.node.index
        for host in [0] if index else range(1, self.node.nnodes):
            send(self.company.stream(host), Report(life, gave_up=True) if index else Order(life, gave_up=True))

    def meet(self, epoch: int, timeout: float) -> None:
        """As `agree`, without a word; this host's part is known then."""
        if self.company is None:
            self.node = replace(self.node, epoch=epoch)
            return
        from common.network.rpc import host_of

        first = host_of(self.node.launchers_meet)
        mine = first if self.node.index == 0 else own_host(first)
        met = self.company.meet(mine, str(epoch).encode(), timeout)
        endpoints = self.node.endpoints if self.node.named else endpoints_of(met.addresses, len(self.node.ranks))
        self.node = replace(self.node, epoch=max(map(int, met.notes)), endpoints=endpoints)


@contextmanager
def find_place(
    hosts: HostsConfig, nranks: int | None, *, ports: int, timeout: float, restarts: bool
) -> Iterator[Place]:
    """This host's part, once the launchers of all hosts have told each other where they are and in which epoch, if they
    need to. While the job may be started again, they are in touch within.

    Args:
        nranks: of the whole job; None: not said.
        ports: how many from --master's on the job needs itself; the launchers meet at the one after.
        timeout: after which a process that gives no sign of life has stalled, in seconds. The ranks of a host may see
            so much later than those of another that somebody is gone, so launchers wait twice as long for each other
            after a failure, and longer still with --host-wait.
        restarts: whether the job is started again after a failure. This may be a host that was away meanwhile; then its
            launcher learns the epoch from the others.

    Raises:
        UsageError, RendezvousError, PeerUnreachable: the flags cannot work, or the other launchers did not come.
        SystemExit: with 0: this host was a spare one (--spares), and the job is over without it.
    """
    if hosts.host_wait and not restarts:
        raise UsageError("--host-wait needs --max-restarts: without it a job that loses a host has failed")
    if hosts.spares and not restarts:
        raise UsageError("--spares needs --max-restarts: without it a job that loses a host has failed")
    node, patience = find_node(hosts, nranks, ports=ports), 2 * timeout + hosts.host_wait
    place = Place(node, patience, waits=hosts.host_wait > 0)
    with ExitStack() as stack:
        if node.launchers_meet and (restarts or not hosts.ips):
            from common.launch.lobby import company_of
            from common.launch.spare_host import SpareHost

            where = node.launchers_meet, node.index, node.nnodes
            if is_spare := node.index >= node.nnodes:
                spare = stack.enter_context(SpareHost(*where, silence=timeout, patience=patience))
                place.node, place.company = replace(node, index=spare.wait_for_place()), spare
            else:
                company = company_of(*where, silence=timeout, spares=hosts.spares)
                place.company = stack.enter_context(company)
            place.meet(0, patience if hosts.host_wait or is_spare else timeout)
        if not restarts:
            stack.close()
        yield place


def find_node(hosts: HostsConfig, nranks: int | None, *, ports: int) -> Node:
    """This host's part, as far as the flags say it; arguments as of `find_place`.

    Raises:
        UsageError: they cannot work.
    """
    ranks_each, index, devices = hosts.ranks_each(nranks), hosts.position(), hosts.selected_devices()
    launchers_meet = ""
    if hosts.meeting_place:
        from common.network.rpc import check_bind_host, host_of

        check_bind_host(host_of(hosts.meeting_place), current())
        launchers_meet = address_after(hosts.meeting_place, ports)
    endpoints = endpoints_of(listed(hosts.ips) or ["127.0.0.1"] * hosts.count, ranks_each)
    return Node(index, hosts.count, hosts.meeting_place, endpoints, devices, launchers_meet, bool(hosts.ips))


def start_rank(
    rank: int, job: Job, node: Node, *, script: Sequence[str], trainer: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Start one of this host's ranks: the user's script if there is one, else the built-in trainer."""
    job.start(
        f"rank {rank}",
        command_of(script, trainer, rank),
        log=f"workerlog.{rank}",
        environment={**node.environment(rank), **environment},
        on_terminal=rank == node.ranks[0],
    )


def command_of(script: Sequence[str], trainer: Sequence[str], rank: int) -> list[str]:
    """What Python runs as that rank."""
    return [str(START), *script] if script else [*trainer, "--rank", str(rank)]


def listed(text: str | None) -> list[str]:
    """The parts of a comma-separated list; none of None."""
    return [] if text is None else [part.strip() for part in text.split(",")]
