"""Where this process stands in its job, read from the environment that a launcher made: ours or Paddle's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import UsageError, choose
from common.launch.config import check_rank
from common.system.addresses import parse_addresses

__all__ = [
    "ALGORITHM_VARIABLE",
    "BACKEND_VARIABLE",
    "CHECKSUM_VARIABLE",
    "DATA_PLANE_VARIABLE",
    "INSECURE_VARIABLE",
    "NCCL_BINDING_VARIABLE",
    "OVERLAP_VARIABLE",
    "RENDEZVOUS_VARIABLE",
    "SERVERS_VARIABLE",
    "TIMEOUT_VARIABLE",
    "UPDATE_CHOICES",
    "UPDATE_VARIABLE",
    "Placement",
    "placement_from",
]

RENDEZVOUS_VARIABLE = "GRADSYNC_RENDEZVOUS"  # where the ranks of a ring meet
SERVERS_VARIABLE = "GRADSYNC_SERVERS"  # HOST:PORT of every parameter server
BACKEND_VARIABLE = "GRADSYNC_BACKEND"
ALGORITHM_VARIABLE = "GRADSYNC_ALGORITHM"  # of a ring's ranks; likewise the checksum
CHECKSUM_VARIABLE = "GRADSYNC_CHECKSUM"
NCCL_BINDING_VARIABLE = "GRADSYNC_NCCL_BINDING"
TIMEOUT_VARIABLE = "GRADSYNC_TIMEOUT"
DATA_PLANE_VARIABLE = "GRADSYNC_DATA_PLANE"  # what carries gradients to parameter servers
INSECURE_VARIABLE = "GRADSYNC_INSECURE"  # 1: listen to other hosts although nothing is encrypted
OVERLAP_VARIABLE = "GRADSYNC_OVERLAP"  # 0: synchronise only when backward is done
UPDATE_VARIABLE = "GRADSYNC_UPDATE"  # who applies a user's optimizer where there are parameter servers
UPDATE_CHOICES = ("auto", "server", "trainer")


@dataclass(frozen=True)
class Placement:
    """One rank's place. Without a launcher: the only rank of its job."""

    rank: int = 0
    nranks: int = 1
    rendezvous: str = ""
    servers: tuple[str, ...] = ()
    backend: str = "auto"
    data_plane: str = "auto"
    algorithm: str = "auto"
    checksum: str = "auto"
    nccl_binding: str = "cupy"
    timeout: float = 30.0
    insecure: bool = False
    overlap: bool = True
    update: str = "auto"
    endpoints: tuple[str, ...] = ("127.0.0.1:6170",)


def placement_from(environment: Mapping[str, str] | None = None) -> Placement:
    """Read our variables, and those of `python -m paddle.distributed.launch` (collective and ps mode).

    Raises:
        UsageError: they contradict each other.
    """
    env = os.environ if environment is None else environment
    rank, nranks = int(env.get("PADDLE_TRAINER_ID", "0")), int(env.get("PADDLE_TRAINERS_NUM", "1"))
    check_rank(rank, nranks)
    endpoints = tuple(filter(None, env.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")))
    if endpoints and len(endpoints) != nranks:
        raise UsageError(f"PADDLE_TRAINER_ENDPOINTS names {len(endpoints)} ranks, PADDLE_TRAINERS_NUM says {nranks}")
    servers = env.get(SERVERS_VARIABLE) or env.get("PADDLE_PSERVERS_IP_PORT_LIST") or ""
    return Placement(
        rank=rank,
        nranks=nranks,
        rendezvous=env.get(RENDEZVOUS_VARIABLE) or meeting_place(endpoints),
        servers=tuple(parse_addresses(servers)) if servers else (),
        backend=env.get(BACKEND_VARIABLE, "auto"),
        data_plane=env.get(DATA_PLANE_VARIABLE, "auto"),
        algorithm=env.get(ALGORITHM_VARIABLE, "auto"),
        checksum=env.get(CHECKSUM_VARIABLE, "auto"),
        nccl_binding=env.get(NCCL_BINDING_VARIABLE, "cupy"),
        timeout=float(env.get(TIMEOUT_VARIABLE, "30")),
        insecure=env.get(INSECURE_VARIABLE, "") == "1",
        overlap=env.get(OVERLAP_VARIABLE, "1") != "0",
        update=choose(UPDATE_VARIABLE, env.get(UPDATE_VARIABLE, "auto"), UPDATE_CHOICES),
        endpoints=endpoints or Placement.endpoints,
    )


def meeting_place(endpoints: tuple[str, ...]) -> str:
    """Under Paddle's launcher the ranks meet at rank 0's endpoint, which it keeps free; if all ranks are on one host,
    at an abstract socket named after it, which no other process can hold as a port."""
    if not endpoints:
        return ""
    hosts = {endpoint.rpartition(":")[0] for endpoint in endpoints}
    if len(hosts) > 1:
        return endpoints[0]
    return f"unix-abstract:gradsync-{os.getuid()}-{endpoints[0].replace(':', '-')}"
