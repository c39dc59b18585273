"""What a launcher tells the processes of a job, put into the environment and read back: their places, their settings.

A field of a Settings class is a flag of the commands and the variable GRADSYNC_FIELD of the ranks; it is declared once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, replace
from typing import Any, TypeVar

from common.errors import UsageError, choose
from common.launch.engines import RENDEZVOUS_VARIABLE, Task, task_from
from common.network.patience import WAIT_LIMIT_S, check_limits
from common.sync.guard import POLICIES
from common.system.addresses import parse_addresses

__all__ = [
    "MOST_PROCESSES",
    "SERVERS_VARIABLE",
    "Placement",
    "Settings",
    "check_rank",
    "placement_from",
    "servers_among",
    "settings_from",
    "told_by_engine",
    "variables_of",
]

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
    non_finite: str = "auto"
    """On NaN or infinite gradients: error, warn, or auto (the built-in trainer: error; your own program: warn);
    with a GradScaler they are its business."""

    def __post_init__(self) -> None:
        check_limits(self.timeout, self.wait_limit)
        choose("non-finite policy", self.non_finite, POLICIES)


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


SERVERS_VARIABLE = PREFIX + "SERVERS"  # addresses; or how many tasks of an engine serve


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
            found[RENDEZVOUS_VARIABLE] = self.rendezvous
        if self.servers:
            found[SERVERS_VARIABLE] = ",".join(self.servers)
        return found


def placement_from(environment: Mapping[str, str] | None = None) -> Placement:
    """Read our variables, and those of the engine that has started this process (engines.py).

    Where GRADSYNC_SERVERS says how many tasks serve, the first ones, and not where servers are, the others are the
    ranks; a task that serves has the place of rank 0.

    Raises:
        UsageError: they contradict each other.
    """
    env = os.environ if environment is None else environment
    task, said = task_from(env), env.get(SERVERS_VARIABLE) or ""
    servers = "" if said.isdecimal() else said or env.get("PADDLE_PSERVERS_IP_PORT_LIST") or ""
    place = Placement(
        rendezvous=env.get(RENDEZVOUS_VARIABLE) or ("" if said or task is None else task.meeting),
        servers=tuple(parse_addresses(servers)) if servers else (),
    )
    if task is None:
        return place
    first = 0 if task.placed else servers_among(task, env)
    check_rank(0, task.count - first)
    return replace(place, rank=max(task.index - first, 0), nranks=task.count - first, endpoints=task.endpoints[first:])


def told_by_engine() -> Placement:
    """What a trainer that is started by itself has for flags that it is not given: the place that its engine says, or
    that of rank 0 of 2."""
    place = placement_from()
    return place if place.nranks > 1 else replace(place, nranks=2)


def servers_among(task: Task, environment: Mapping[str, str] | None = None) -> int:
    """How many tasks, the first ones, GRADSYNC_SERVERS wants to serve; 0 where it says where servers are.

    Raises:
        UsageError: that leaves no rank.
    """
    text = (os.environ if environment is None else environment).get(SERVERS_VARIABLE, "")
    count = int(text) if text.isdecimal() else 0
    if count >= task.count:
        raise UsageError(f"{SERVERS_VARIABLE}={count} leaves none of {task.count} tasks to train; start more of them")
    return count
