"""A switch by size: short arrays go straight to the ranks that reduce them, long ones round the ring."""

from __future__ import annotations

import numpy.typing as npt

from collective.algorithm import Algorithm
from collective.algorithms.direct_tcp import DirectTcp
from collective.algorithms.ring import RingAlgorithm
from collective.call_tags import Array, Label
from collective.transports.base import Transport
from common.tensors.reduction import Reduction

__all__ = ["SHORT_BYTES", "BySize"]

SHORT_BYTES = 4 << 20  # divided by N: 1 MiB at N=4; measured


class BySize(Algorithm):
    """A broadcast always takes the ring: one rank would have to send N-1 times."""

    name = "direct"

    def __init__(self, transport: Transport) -> None:
        self.rank, self.nranks = transport.rank, transport.nranks
        self.transport = transport
        self._short_bytes = SHORT_BYTES // self.nranks
        self._short = DirectTcp(transport, self._short_bytes)
        self._long = RingAlgorithm(transport)

    def empty(self, count: int, dtype: npt.DTypeLike) -> Array:
        return self.transport.empty(count, dtype)

    def all_reduce(self, flat: Array, reduction: Reduction, label: Label) -> None:
        self._fitting(flat).all_reduce(flat, reduction, label)

    def reduce_scatter(self, flat: Array, reduction: Reduction, label: Label) -> None:
        self._fitting(flat).reduce_scatter(flat, reduction, label)

    def all_gather(self, rows: Array, label: Label) -> None:
        self._fitting(rows).all_gather(rows, label)

    def gather_chunks(self, flat: Array, label: Label) -> None:
        self._fitting(flat).gather_chunks(flat, label)

    def broadcast(self, flat: Array, root: int, label: Label) -> None:
        self._long.broadcast(flat, root, label)

    def close(self, reason: str = "") -> None:
        self.transport.close(reason)

    def _fitting(self, array: Array) -> DirectTcp | RingAlgorithm:
        return self._short if array.nbytes <= self._short_bytes else self._long
