"""Which of a job's launchers decides on replacing processes: the only one, or that of the first host."""

from __future__ import annotations

from collections.abc import Callable

from common.launch.crew import Crew, CrewHere
from common.launch.hosts import Place
from common.launch.job import Job
from common.launch.replacing import Replacing
from common.launch.servers import Servers

__all__ = ["mending"]


def mending(
    job: Job,
    start: Callable[[int, str], None],
    place: Place,
    *,
    patience: float,
    wait_limit: float,
    first: str,
    servers: Servers | None = None,
) -> Callable[[], bool]:
    """What the job asks again and again whether that which has failed is being mended; arguments as of Replacing, but
    those who wait do so for `wait_limit` themselves: the launcher is to decide before they give up."""
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
        patience,
        servers,
        others,
        place=node.meeting_place,
        hosts=place if others else None,
        first=first,
        wait_limit=wait_limit - patience,
    ).look
