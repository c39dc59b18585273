"""What a launcher tells the processes of a job, put into the environment and read back: their places, their settings.

A field of a Settings class is a flag of the commands and the variable GRADSYNC_FIELD of the ranks; it is declared once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, TypeVar

from common.errors import UsageError
from common.network.patience import WAIT_LIMIT_S, check_limits
from common.system.addresses import parse_addresses

__all__ = ["MOST_PROCESSES", "Placement", "Settings", "check_rank", "placement_from", "settings_from", "variables_of"]

PREFIX = "GRADSYNC_"
MOST_PROCESSES = 1024  # of one kind in one job


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the processes of a job synchronise, whatever the scheme."""

    timeout: float = 30.0
    """How long to wait for another process that has not joined, or gives no sign of life, in seconds."""
    wait_limit: float = WAIT_LIMIT_S
    """How long to wait for one that is alive but busy, in seconds."""
    overlap: bool = True
    """Synchronise buckets while backward goes on."""
    allow_pickle: bool = False
    """Let all_gather_object and its like pickle what is no plain type; on one host only."""

    def __post_init__(self) -> None:
        check_limits(self.timeout, self.wait_limit)


S = TypeVar("S", bound=Settings)


def variables_of(kind: type[Settings], values: Settings) -> dict[str, str]:
    """The settings of that kind among these, as a rank's environment."""
    return {variable_of(entry): as_text(getattr(values, entry.name)) for entry in fields(kind)}


def settings_from(kind: type[S], environment: Mapping[str, str] | None = None) -> S:
    """The settings that a launcher has put into the environment; what it has not is as usual.

    Raises:
        UsageError: a value that cannot be; the message names the variable or the flag.
    """
    env = os.environ if environment is None else environment
    found: dict[str, Any] = {e.name: read(e, text) for e in fields(kind) if (text := env.get(variable_of(e)))}
    return kind(**found)


def variable_of(entry: Field[Any]) -> str:
    return PREFIX + entry.name.upper()


def as_text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def read(entry: Field[Any], text: str) -> Any:
    """The value of a field from the environment, of the type of its default."""
    kind: type[Any] = type(entry.default)
    try:
        return text != "0" if kind is bool else kind(text)
    except ValueError as exc:
        raise UsageError(f"{variable_of(entry)} must be of type {kind.__name__} (got {text!r})") from exc


def check_rank(rank: int, nranks: int) -> None:
    """Raise UsageError unless 0 <= rank < nranks."""
    if nranks < 1:
        raise UsageError(f"--nranks must be at least 1 (got {nranks})")
    if nranks > MOST_PROCESSES:
        raise UsageError(f"--nranks can be at most {MOST_PROCESSES} (got {nranks})")
    if not 0 <= rank < nranks:
        raise UsageError(f"rank {rank} is outside 0..{nranks - 1} (--nranks {nranks})")


RENDEZVOUS, SERVERS = (PREFIX + name for name in ("RENDEZVOUS", "SERVERS"))


@dataclass(frozen=True)
class Placement:
    """One rank's place in its job, and where it meets the others. Without a launcher: the only rank of its job.

    Args:
        rendezvous: where the ranks of a ring meet; "": nowhere, as under the launcher of servers.
        servers: HOST:PORT of every parameter server.
        endpoints: the names that Paddle gives the ranks; nobody listens there.
    """

    rank: int = 0
    nranks: int = 1
    rendezvous: str = ""
    servers: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ("127.0.0.1:6170",)

    def variables(self) -> dict[str, str]:
        """What a launcher adds to the environment of all ranks, beside what Paddle's does for each."""
        found = {}
        if self.rendezvous:
            found[RENDEZVOUS] = self.rendezvous
        if self.servers:
            found[SERVERS] = ",".join(self.servers)
        return found


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
    servers = env.get(SERVERS) or env.get("PADDLE_PSERVERS_IP_PORT_LIST") or ""
    return Placement(
        rank=rank,
        nranks=nranks,
        rendezvous=env.get(RENDEZVOUS) or ("" if env.get(SERVERS) else meeting_place(endpoints)),
        servers=tuple(parse_addresses(servers)) if servers else (),
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
