"""Fleet's and paddle.distributed's names over the ring."""

from __future__ import annotations

from functools import partial
from typing import Any

from collective.flags import RingSettings, connect_with
from collective.synchronizer import RingSynchronizer
from common.errors import UsageError
from common.launch.settings import Placement, settings_from
from common.paddle_api.fleet_api import FleetApi
from common.paddle_api.names import OWN, PUBLIC, own_of_paddle
from common.sync.synchronizer import Synchronizer

__all__ = ["join", "surface"]


def join(place: Placement, synchronizer: type[RingSynchronizer] = RingSynchronizer) -> Synchronizer:
    if place.servers and not place.rendezvous:
        raise UsageError(
            "this program uses collective, but was started with python -m ps.run, whose servers nobody would join: "
            "start it with python -m collective.run, or import ps instead"
        )
    if place.nranks > 1 and not place.rendezvous:
        raise UsageError(
            "nothing says where the ranks meet: set GRADSYNC_RENDEZVOUS=HOST:PORT for all, with the host of rank 0 "
            "(and leave out GRADSYNC_SERVERS, which is for ps)"
        )
    settings = settings_from(RingSettings)
    connect = partial(connect_with, settings, place.rank, place.nranks)
    return synchronizer(connect(place.rendezvous), overlap=settings.overlap, connect=connect)


surface = FleetApi("collective", join)


def __getattr__(name: str) -> Any:
    """So that `from collective import fleet` has Fleet's names."""
    if name not in (*OWN, *PUBLIC):
        return own_of_paddle(__name__, name, (*OWN, *PUBLIC))
    return getattr(surface, name)
