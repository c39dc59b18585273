"""What `fleet.get_hybrid_communicate_group` gives a job that is parallel in its data only: of Paddle's own type."""

from __future__ import annotations

import inspect
from typing import Any

from paddle.distributed.fleet.base.topology import CommunicateTopology, HybridCommunicateGroup

__all__ = ["DataParallelGroups"]


class DataParallelGroups(HybridCommunicateGroup):  # type: ignore[misc]
    """All ranks along `data`; along every other dimension a rank is alone.

    Args:
        rank: of this process.
        everyone: the group of all ranks.
        alone: a group of this rank only.
    """

    def __init__(self, rank: int, nranks: int, everyone: Any, alone: Any) -> None:  # Paddle's makes Paddle's groups
        names = list(inspect.signature(CommunicateTopology).parameters["hybrid_group_names"].default)
        self.nranks, self.global_rank = nranks, rank
        self._topo = CommunicateTopology(names, [nranks if name == "data" else 1 for name in names])
        self._dp_degree = nranks
        self._mp_degree = self._pp_degree = self._sharding_degree = self._sep_degree = 1
        self._data_parallel_id = rank
        self._model_parallel_id = self._sharding_parallel_id = self._sep_parallel_id = self.stage_id = 0
        self._dp_group, self._dp_comm_group = list(range(nranks)), everyone
        self._mp_group = self._pp_group = self._sharding_group = self._check_group = [rank]
        self._mp_comm_group = self._pp_comm_group = self._sharding_comm_group = self._check_comm_group = alone
        self._sep_group = None
        self.is_first_stage = self.is_last_stage = True
        self.prev_rank = self.next_rank = rank
