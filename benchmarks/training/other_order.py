"""The ring, summing in another order, as good as the canonical one: how far rounding alone takes two trainings apart.

Only `compare script.py` uses it, to judge another library's distance from ours; no flag of a training leads here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy.typing as npt

from collective.fleet import join
from collective.synchronizer import RingSynchronizer
from common.paddle_api.fleet_api import FleetApi
from common.tensors.reduction import reduce_bucket

__all__ = ["OtherOrder", "surface"]


class OtherOrder(RingSynchronizer):
    """Sums chunk c one rank further on: from rank c+2 (mod N) round to rank c+1. With one or two ranks that changes no
    bit; with three or more each element is rounded differently."""

    def _average(self, gradients: npt.NDArray[Any], bucket: int) -> None:  # noqa: ARG002
        first, *others = self._group.all_gather(gradients)
        size = gradients.size
        reduce_bucket([*others, first], gradients, bucket_start=0, bucket_length=size, start=0, stop=size)


surface = FleetApi("collective", partial(join, synchronizer=OtherOrder))
