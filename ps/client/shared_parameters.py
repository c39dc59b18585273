"""One copy of the parameters for all trainers of a host: rank 0's memory, mapped in the place of each one's own."""

from __future__ import annotations

from collections.abc import Sequence

from common.network.gradsync_pb2 import Place
from common.system.memory import Segment
from common.tensors.arena import FloatArray
from ps.planes.shm_trainer import TrainerMemory
from ps.store.shards import Shard

__all__ = ["SharedParameters"]


class SharedParameters:
    """The arena's parameters of one trainer, as long as they are everybody's."""

    def __init__(self, memory: TrainerMemory) -> None:
        self._memory = memory
        self._mapped: tuple[Segment, int] | None = None  # the common memory, and where it lies here

    def share(self, parameters: FloatArray, rank: int, places: Sequence[tuple[Shard, Place]]) -> bool:
        """Have the common memory in the place of `parameters`, if that can be done.

        Args:
            places: each server's shard, and where in rank 0's memory its first word is.
        """
        mine = self._memory.pool.locate(parameters)
        if mine is None:
            return False
        own = self._memory.pool.segments[mine[0]]
        if rank == 0:
            self._mapped = own, own.address
            return True
        keys = {place.memory.key for _, place in places}
        offsets = {place.offset - 4 * shard.start for shard, place in places}
        if mine[1] != 0 or len(keys) != 1 or offsets != {0}:
            return False
        common = self._memory.others.segment(places[0][1].memory)
        if own.nbytes != common.nbytes:
            return False
        common.lay_over(own.address)
        self._mapped = common, own.address
        return True

    def part(self) -> None:
        """What this process writes from now on is its own affair."""
        if self._mapped:
            segment, address = self._mapped
            segment.lay_over(address, private=True)
            self._mapped = None
