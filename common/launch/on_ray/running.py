"""A launcher's job on a cluster of Ray's, from the flags to its end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from common.launch.joining import Joining
from common.launch.on_ray.cluster import connected, reserved
from common.launch.on_ray.flags import EngineFlags
from common.launch.on_ray.ray_job import RayJob
from common.launch.restarts import Life, RestartFlags, supervise

__all__ = ["run_on_ray"]

RANKS = 2  # if nothing is said


def run_on_ray(
    flags: EngineFlags,
    start: Callable[[RayJob], object],
    *,
    package: str,
    script: Sequence[str],
    launcher: Collection[str],
    nranks: int | None,
    servers: int = 0,
    timeout: float,
    log_dir: Path | None,
    restarts: RestartFlags,
) -> None:
    """Run a job on the cluster, again and again as far as `restarts` allow; returns when it has ended well.

    Args:
        start: starts the processes of a job.
        package: the launcher's, "ps" or "collective".
        launcher: its flags.
    """

    def live(life: Life) -> None:
        joining = Joining(script, package, nranks or RANKS, timeout, flags=launcher) if script else None
        with (
            reserved(flags, nranks=nranks or RANKS, servers=servers, life=life.number, timeout=timeout) as seats,
            RayJob(log_dir, joining=joining, life=life, seats=seats) as job,
        ):
            start(job)
            job.wait()

    with connected(flags.address):
        supervise(restarts, live, prog=f"{package}.run")
