"""The groups of one number of ranks: who leaves the cores to others, who is started anew, and who has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from benchmarks.contestants.table_of_sweeps import OURS, load_backend
from benchmarks.netlab.config import ClusterConfig
from benchmarks.netlab.hosts import Hosts
from benchmarks.operations.group import MeasuredGroup
from benchmarks.operations.measured import Measured
from common.errors import GradSyncError
from common.launch.job import Job

__all__ = ["Groups", "groups_of", "leave", "leaving", "restless_among"]


@dataclass
class Groups:
    """What one number of ranks is measured with.

    Args:
        started: those that leave the cores to others while they are not measured.
        restless: by name, how the others are started: anew in each round, when the rest of it is done.
        link: a plain stream, between emulated hosts.
    """

    nranks: int
    started: list[MeasuredGroup]
    restless: Mapping[str, Callable[[], AbstractContextManager[MeasuredGroup]]] = field(default_factory=dict)
    link: MeasuredGroup | None = None


@contextmanager
def groups_of(
    nranks: int,
    backends: Sequence[str],
    operation: str,
    servers: int,
    hosts: Hosts,
    cluster: ClusterConfig,
    measured: Measured,
) -> Iterator[Groups]:
    """Another library's that do not start are noted in `measured`."""
    ranks, placed = range(nranks), range(nranks, nranks + servers)

    def group_of(name: str, job: Job) -> MeasuredGroup:
        return MeasuredGroup(job, name, hosts, ranks, operation=operation, servers=placed)

    @contextmanager
    def alone(name: str) -> Iterator[MeasuredGroup]:
        with Job() as job, group_of(name, job) as group:
            yield group
            group.close()  # its ends of the sockets tell the workers to leave

    restless = restless_among(backends, operation)
    with Job() as job, ExitStack() as groups:
        started = []
        for name in (each for each in backends if each not in restless):
            with leaving(name, measured), ExitStack() as mine:
                of_its_own = job if name in OURS else mine.enter_context(Job())  # so that only it is blamed for it
                started.append(mine.enter_context(group_of(name, of_its_own)))
                groups.enter_context(mine.pop_all())
        link = groups.enter_context(MeasuredGroup(job, "link", hosts, cluster.slowest())) if hosts.emulated else None
        yield Groups(nranks, started, {name: partial(alone, name) for name in restless}, link)
        groups.close()


def restless_among(backends: Sequence[str], op: str) -> list[str]:
    """Those that are started anew for each round, one at a time: libraries that take the cores while they wait; and all
    that have servers, which together would hold some 20 GB at 100 MB."""
    return [name for name in backends if op == "push_pull" or getattr(load_backend(name), "restless", False)]


@contextmanager
def leaving(backend: str, measured: Measured) -> Iterator[None]:
    """What fails here ends the sweep if it is ours."""
    try:
        yield
    except GradSyncError as exc:
        if backend in OURS:
            raise
        measured.failed[backend] = str(exc)


def leave(groups: Groups, measured: Measured) -> None:
    """Close those that failed."""
    for group in groups.started:
        if group.backend in measured.failed:
            group.close()
    groups.started = [group for group in groups.started if group.backend not in measured.failed]
