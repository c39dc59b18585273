"""A launcher that an engine has started as one of several tasks: it starts no ranks, it becomes one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NoReturn

from common.errors import UsageError
from common.launch.engines import Task, task_from
from common.launch.hosts import HostsConfig, command_of
from common.launch.ranks import name_of

__all__ = ["SEVERAL", "become_rank", "meet_tasks", "place_of", "task_here"]

SEVERAL = ("devices", "nproc_per_node", "ips", "master", "nnodes", "node_rank")  # flags of who starts ranks itself


def task_here(
    hosts: HostsConfig,
    nranks: int | None,
    *,
    servers: int = 0,
    refused: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Task | None:
    """The task that this launcher is; None: it is one of no several, or its flags say that it starts ranks here.

    Args:
        nranks: what the flags say; None: nothing.
        servers: how many of the tasks serve.
        refused: flags that are of no use to a task, and their values.

    Raises:
        UsageError: the flags contradict the engine, or it does not say where the tasks meet.
    """
    if any(getattr(hosts, name) is not None for name in SEVERAL):
        return None
    task = task_from(environment)
    if task is None or task.count == 1 or task.placed:
        return None
    if nranks not in (None, task.count - servers):
        parts = f", {servers} of them servers" if servers else ""
        raise UsageError(
            f"--nranks {nranks} contradicts {task.engine}, which has started {task.count} tasks{parts} "
            f"({task.because}): each is a rank. Leave --nranks out; or give --nproc-per-node {nranks}, and each task "
            "starts so many ranks of its own"
        )
    for flag, value in (refused or {}).items():
        if value is not None:
            raise UsageError(f"--{flag} is for ranks that a launcher starts; this is {task}: leave it out")
    return task


def place_of(task: Task) -> str:
    """Where the tasks meet.

    Raises:
        UsageError: nobody says.
    """
    if not task.meeting:
        raise UsageError(
            f"this is {task}, on several hosts, and nothing says where they meet: set GRADSYNC_RENDEZVOUS=HOST:PORT "
            "for all, with the host of task 0"
        )
    return task.meeting


def become_rank(
    task: Task, rank: int, nranks: int, *, script: Sequence[str], trainer: Sequence[str], environment: Mapping[str, str]
) -> NoReturn:
    """Go on as that rank, in place of this program: the engine's signals reach it, and its exit code the engine.

    Args:
        script: the user's program, with what comes before it; empty: the built-in trainer is run.
    """
    if rank == 0:
        what = name_of(script[2:] if script[0] == "--install" else script) if script else "the training"
        serve = f"{task.count - nranks} serve, {nranks} are ranks" if task.count > nranks else "each is one rank"
        print(f"{task.engine} has started {task.count} tasks of {what}: {serve}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    told = {**os.environ, "PYTHONUNBUFFERED": "1", **task.environment(rank, nranks), **environment}
    os.execve(sys.executable, [sys.executable, *command_of(script, trainer, rank)], told)


def meet_tasks(task: Task, told: str, *, timeout: float) -> tuple[str, ...]:
    """What each task has told all, in their order; blocks until all have, `timeout` seconds at most.

    Raises:
        RendezvousError, PeerUnreachable, PortInUse: they did not come together.
    """
    from common.network.rendezvous import RendezvousServer, join

    where = place_of(task)
    with ExitStack() as stack:
        if task.index == 0:
            stack.enter_context(RendezvousServer(where, task.count, timeout=timeout, member="task"))
        met = join(
            where, rank=task.index, nranks=task.count, backend="", address=told or "-", timeout=timeout, member="task"
        )
    return tuple("" if each == "-" else each for each in met.addresses)
