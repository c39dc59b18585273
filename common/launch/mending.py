"""Which of a job's launchers decides on replacing processes: the only one, or that of the first host."""

from __future__ import annotations

from collections.abc import Callable

from common.launch.crew import Crew, CrewHere
from common.launch.hosts import Place
from common.launch.job import Job
from common.launch.replacing import Replacing
from common.launch.servers import Servers
from common.launch.settings import Settings

__all__ = ["mending"]


def mending(
    job: Job,
    start: Callable[[int, str], None],
    place: Place,
    settings: Settings,
    first: str,
    servers: Servers | None = None,
) -> Callable[[], bool]:
    """What the job asks again and again whether that which has failed is being mended.

    Args:
        place: this host's among all.
        settings: of the ranks, which wait for `wait_limit` themselves: the launcher is to decide before they give up.
        job, start, first, servers: as of Replacing.
    """
    first = "" if job.was_adopted else first
    node, company, epoch = place.node, place.company, job.life.number
    others: list[Crew] = []
    if company is not None:
        from common.launch.following import Following
        from common.launch.remote_crew import RemoteCrew

        if node.index:
            return Following(CrewHere(job, start, first), company.stream(0), place).look
        others += [RemoteCrew(company.stream(h), node.ranks_of(h), epoch) for h in range(1, node.nnodes)]
    return Replacing(
        job,
        start,
        settings.timeout,
        servers,
        others,
        place=node.meeting_place,
        hosts=place if others else None,
        first=first,
        wait_limit=settings.wait_limit - settings.timeout,
    ).look
