"""A cluster of Ray's, and what a job has reserved of it: a place for each process, and an actor there."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from common.credentials.credentials import Credentials, environment_of
from common.credentials.token import new_token, secret_of
from common.errors import GradSyncError, PeerUnreachable, UsageError
from common.launch.ranks import FIRST_PORT, abstract_address, paddle_environment
from common.system.addresses import address_of
from common.system.sigterm import ENGINE_VARIABLE

if TYPE_CHECKING:
    from common.launch.on_ray.flags import EngineFlags

__all__ = ["Seats", "connected", "lost_actors", "reserved"]

CONNECT_S = 5.0
DEAD = "The actor is dead because"  # in Ray's messages, before the reason
OURS = ("GRADSYNC_", "FLAGS_", "PYTHON", "OMP_")  # variables that the processes are given from the driver's environment


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """This process is a driver of that cluster within.

    Raises:
        UsageError: Ray is not installed.
        PeerUnreachable: nobody answers there.
    """
    try:
        import ray
    except ImportError as exc:
        raise UsageError("--engine ray needs Ray: pip install 'gradsync[ray]'") from exc
    keep_quiet()
    check_address(address or os.environ.get("RAY_ADDRESS", ""))
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except Exception as exc:  # of many types
        where = f"at {address}" if address else "here"
        raise PeerUnreachable(
            f"no cluster of Ray's can be used {where}: {first_line(exc)}; if it asks for a token, "
            "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
        ) from exc
    try:
        yield
    finally:
        ray.shutdown()


def keep_quiet() -> None:
    """Have Ray not write to this terminal what it notices itself, of a lost node dozens of lines; its logs have that,
    and the launcher says in a line of its own what of it concerns the job."""
    vars(import_module("ray._private.worker"))["print_to_stdstream"] = lambda *_, **__: None


def check_address(address: str) -> None:
    """Ask whether anybody listens there: Ray itself tries for a minute, and then ends this process."""
    if address in ("", "auto", "local"):
        return
    if "://" in address:
        raise UsageError(f"{address}: give HOST:PORT of the cluster's head, from a node of it (or use ray job submit)")
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise PeerUnreachable(
            f"no cluster of Ray's at {address} ({why}); ray start --head starts one, and says its address"
        ) from exc


@dataclass(frozen=True)
class Seats:
    """The places of a job's processes.

    Args:
        actors: of `Seat`, by the process's name.
        hosts: the address of each one's node, likewise.
        nodes: Ray's name of it, likewise.
        ports: one that was free there, likewise.
    """

    actors: Mapping[str, Any]
    hosts: Mapping[str, str]
    nodes: Mapping[str, str]
    ports: Mapping[str, int]
    nranks: int

    def address(self, name: str) -> str:
        """HOST:PORT where that process can listen."""
        return address_of(self.hosts[name], self.ports[name])

    @property
    def meeting_place(self) -> str:
        """Where the ranks of a ring meet: on one node, a socket of that node's, so that they share memory."""
        alone = len({self.nodes[f"rank {rank}"] for rank in range(self.nranks)}) == 1
        return abstract_address("ring") if alone else self.address("rank 0")

    def environment(self, rank: int) -> dict[str, str]:
        """What Paddle's launcher would tell that rank."""
        hosts = [self.hosts[f"rank {each}"] for each in range(self.nranks)]
        before = [hosts[:each].count(host) for each, host in enumerate(hosts)]
        endpoints = [address_of(host, FIRST_PORT + local) for host, local in zip(hosts, before, strict=True)]
        told = paddle_environment(rank, endpoints, nnodes=len({*hosts}), local=before[rank])
        return {**told, ENGINE_VARIABLE: "Ray"}


@contextmanager
def reserved(flags: EngineFlags, *, nranks: int, servers: int, life: int, timeout: float) -> Iterator[Seats]:
    """Places for the processes of a job, all or none; given back at the end.

    Raises:
        UsageError: the cluster has no room within `timeout` seconds.
        PeerUnreachable: an actor does not start.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    names = [f"server {index}" for index in range(servers)] + [f"rank {rank}" for rank in range(nranks)]
    strategy = flags.strategy or ("SPREAD" if servers else "PACK")
    group = placement_group([flags.bundle] * len(names), strategy=strategy)
    actors: dict[str, Any] = {}
    try:
        if not group.wait(timeout):
            raise UsageError(no_room(flags, nranks, servers, strategy, timeout))
        bundles = in_order_of_nodes(ray.util.placement_group_table(group)["bundles_to_node_id"], servers)
        nodes = {name: node for name, (_, node) in zip(names, bundles, strict=True)}
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        hosts = {name: addresses[node] for name, node in nodes.items()}
        variables = variables_of_job()
        for name, (bundle, _) in zip(names, bundles, strict=True):
            actors[name] = start_actor(flags, group, bundle, variables, life)
        ports = ports_of(actors, hosts, timeout)
        yield Seats(actors, hosts, nodes, ports, nranks)
    finally:
        for actor in actors.values():
            ray.kill(actor)
        remove_placement_group(group)


def in_order_of_nodes(nodes: Mapping[int, str], servers: int) -> list[tuple[int, str]]:
    """(bundle, node) of each process: the servers', then the ranks', those of one node beside each other.

    >>> in_order_of_nodes({0: "a", 1: "b", 2: "c", 3: "b", 4: "c"}, 1)
    [(0, 'a'), (1, 'b'), (3, 'b'), (2, 'c'), (4, 'c')]
    """
    listed = sorted(nodes.items())
    first = {node: bundle for bundle, node in reversed(listed)}
    return listed[:servers] + sorted(listed[servers:], key=lambda each: (first[each[1]], each[0]))


def variables_of_job() -> dict[str, str]:
    """For the environment of its processes: settings of the driver's, and a new secret in place of all credentials."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(OURS)}
    made = Credentials("token", "this job's", secret_of(new_token(), "the driver"))
    return {**kept, **environment_of(made)}


def start_actor(flags: EngineFlags, group: Any, bundle: int, variables: Mapping[str, str], life: int) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from common.launch.on_ray.seat import Seat

    seat: Any = ray.remote(Seat).options(
        num_cpus=flags.bundle["CPU"],
        memory=flags.bundle["memory"],
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    )
    return seat.remote(variables, life)


def ports_of(actors: Mapping[str, Any], hosts: Mapping[str, str], timeout: float) -> dict[str, int]:
    """A free one for each process, which its actor finds as soon as it has started."""
    import ray

    asked = {name: actor.free_port.remote(hosts[name]) for name, actor in actors.items()}
    ready, late = ray.wait([*asked.values()], num_returns=len(asked), timeout=timeout)
    ports = {}
    for name, ref in asked.items():
        if ref in late:
            raise PeerUnreachable(
                f"{name}: its actor on node {hosts[name]} has not started within {timeout:g} s (--timeout); "
                f"{len(ready)} of {len(asked)} have: start fewer processes, or raise --timeout"
            )
        with lost_actors(partial(cannot_start, name, hosts[name])):
            ports[name] = int(ray.get(ref))
    return ports


def cannot_start(name: str, host: str, why: str) -> GradSyncError:
    return PeerUnreachable(
        f"{name}: its actor cannot start on node {host}: {why}; see that GradSync can be imported there, "
        "and that RAY_AUTH_MODE here is the cluster's"
    )


@contextmanager
def lost_actors(error: Callable[[str], GradSyncError]) -> Iterator[None]:
    """Errors of an actor's as ours: what it has raised itself, or `error` of why it is not there.

    Raises:
        GradSyncError: that.
    """
    from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

    try:
        yield
    except RayTaskError as exc:
        if isinstance(exc.cause, GradSyncError):
            raise exc.cause from None
        raise
    except ActorUnavailableError as exc:
        raise error("Ray no longer reaches it") from exc
    except RayError as exc:
        raise error(first_line(exc)) from exc


def first_line(error: BaseException) -> str:
    """What a message of Ray's, of many lines, comes to."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    for sign in (DEAD, "Error: "):
        if told := [line for line in lines if sign in line]:
            return told[-1].removeprefix(DEAD).strip().partition(". ")[0].rstrip(".")
    return lines[0].partition(". ")[0].rstrip(".")


def no_room(flags: EngineFlags, nranks: int, servers: int, strategy: str, timeout: float) -> str:
    """What to tell if Ray has none."""
    import ray

    free: Mapping[str, float] = ray.available_resources()
    what = f"{nranks} ranks" + (f" and {servers} server{'s' * (servers > 1)}" if servers else "")
    return (
        f"Ray has had no room for {what} of {flags.cpus_each:g} CPU and {flags.memory_each} MB each ({strategy}) for "
        f"{timeout:g} s (--timeout): {free.get('CPU', 0):g} CPU and {free.get('memory', 0) / 1e6:,.0f} MB are free; "
        "start fewer, or lower --cpus-each or --memory-each"
    )
