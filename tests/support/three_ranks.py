"""A scheme's surface at the place of the last of three ranks, which are simulated."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.launch.settings import Placement
from common.sync.local import LocalSynchronizer

__all__ = ["ENDPOINTS", "PLACE", "ThreeRanks", "fleet_at"]

ENDPOINTS = ("10.0.0.1:6170", "10.0.0.1:6171", "[fe80::1]:6170")
PLACE = Placement(rank=2, nranks=3, endpoints=ENDPOINTS, servers=("h:1", "h:2"))


class ThreeRanks(LocalSynchronizer):
    """The ranks before this one have once and twice its values, and 1 and 2 more."""

    def all_gather(self, values: Any) -> Any:
        return np.stack([values, 2 * values + 1, 3 * values + 2])


def fleet_at(place: Placement = PLACE) -> Any:
    from common.paddle_api.fleet_api import FleetApi

    fleet = FleetApi("test", lambda _: ThreeRanks())
    fleet.placement = place
    fleet._synchronizer = ThreeRanks()
    fleet._synchronizer.rank, fleet._synchronizer.nranks = place.rank, place.nranks
    return fleet
