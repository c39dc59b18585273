"""What Fleet says of the places of a job, and what its workers do together: a part of `FleetApi`."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.base import topology
from paddle.distributed.fleet.base.distributed_strategy import DistributedStrategy
from paddle.distributed.fleet.base.role_maker import PaddleCloudRoleMaker, RoleMakerBase
from paddle.distributed.fleet.utils.log_util import set_log_level

from common.launch.settings import Placement
from common.paddle_api.fleet_util import Worker, metrics_of, util_of
from common.paddle_api.hybrid_groups import DataParallelGroups
from common.paddle_api.parallel_env import parallel_env_of
from common.paddle_api.strategy import check_strategy
from common.sync.synchronizer import Synchronizer

__all__ = ["FleetPlaces"]

SERVERS_OF_PADDLE = "PADDLE_PSERVERS_IP_PORT_LIST"


class FleetPlaces(ABC):
    """Places and what goes with them. Of a program that gives `fleet.init` neither a role maker nor `is_collective`
    Paddle thinks that it has servers; where no launcher has started any, each rank is then the first of one."""

    placement: Placement
    ParallelEnv: Any

    def __init__(self) -> None:
        self._strategy: Any = None  # that `init` or distributed_optimizer was given
        self._given_role: Any = None  # by `init`
        self._is_collective = False
        self._context: dict[str, Any] = {}  # of static programs, as what follows
        self._runtime_handle = None
        self._minimised: Any = None  # the optimizer that was given to distributed_optimizer
        self._hybrid: tuple[Synchronizer, DataParallelGroups] | None = None
        self._each_is_first = False
        self.ParallelEnv = parallel_env_of(lambda: self.placement)
        self.Fleet = fleet_type(self)

    @abstractmethod
    def _joined(self) -> Synchronizer:
        """The one of this process, which joins if it has not."""

    def _begin(self, role_maker: Any, strategy: Any, log_level: Any, *, is_collective: bool) -> None:
        """Take note of what `init` was given.

        Raises:
            UsageError: the strategy asks for what data parallelism is not.
        """
        self._check(strategy)
        set_log_level("WARNING")  # a strategy of no settings would say on every rank that it is there
        self._strategy, self._given_role = DistributedStrategy() if strategy is None else strategy, role_maker
        set_log_level(log_level)
        self._is_collective = bool(getattr(role_maker, "_is_collective", is_collective))
        self.__dict__.pop("_role_maker", None)
        self._each_is_first = role_maker is None and not is_collective and not os.environ.get(SERVERS_OF_PADDLE)

    def _check(self, strategy: Any) -> None:
        check_strategy(strategy, self.placement.nranks, self._tell)

    def _tell(self, line: str) -> None:
        if self.placement.rank == 0:
            print(line, file=sys.stderr, flush=True)

    @property
    def fleet(self) -> Any:
        """The one Fleet, which has all of these as its methods."""
        return self

    def worker_index(self) -> int:
        return 0 if self._each_is_first else self.placement.rank

    def worker_num(self) -> int:
        return 1 if self._each_is_first else self.placement.nranks

    rank = worker_index
    nranks = world_size = worker_num

    def is_first_worker(self) -> bool:
        return self.is_worker() and self.worker_index() == 0

    def is_worker(self) -> bool:
        return not self._serves()

    def is_server(self) -> bool:
        return self._serves()

    def _serves(self) -> bool:
        return False

    def is_coordinator(self) -> bool:
        return False

    def node_num(self) -> int:
        """The number of hosts."""
        return len({endpoint.rpartition(":")[0] for endpoint in self.placement.endpoints})

    def local_rank(self) -> str:
        """This rank's number on its host; a text, as in Paddle."""
        return os.environ.get("PADDLE_RANK_IN_NODE") or os.environ.get("PADDLE_LOCAL_RANK") or str(self.placement.rank)

    rank_in_node = local_rank

    def local_device_ids(self) -> str | None:
        """What the launcher says of this rank's devices, if it does."""
        return os.environ.get("PADDLE_LOCAL_DEVICE_IDS")

    def world_device_ids(self) -> str | None:
        """What the launcher says of all ranks' devices, if it does."""
        return os.environ.get("PADDLE_WORLD_DEVICE_IDS")

    def worker_endpoints(self, to_string: bool = False) -> Any:
        return told(self.placement.endpoints, to_string)

    def server_endpoints(self, to_string: bool = False) -> Any:
        return told(self.placement.servers, to_string)

    def server_num(self) -> int:
        return len(self.placement.servers)

    def server_index(self) -> int:
        return self.worker_index()

    @cached_property
    def util(self) -> Any:
        """A `UtilBase`: arrays of NumPy's between workers, and the share of a list of files."""
        return util_of(Worker(self.worker_index, self.worker_num, self._gathered))

    @cached_property
    def metrics(self) -> Any:
        """Paddle's sum, max, min, auc, mae, rmse, mse and acc over all workers."""
        return metrics_of(self.util)

    def barrier_worker(self) -> None:
        """Block until every rank has called it."""
        self.util.barrier()

    def collective_perf(self, comm_type: str, round: int = 50, size_and_time: Any = None) -> None:  # noqa: A002, B027
        """Measures nothing, as in Paddle 3."""

    def minimize(
        self, loss: Any, startup_program: Any = None, parameter_list: Any = None, no_grad_set: Any = None
    ) -> Any:
        """`minimize` of the optimizer that was given to `distributed_optimizer` last."""
        return self._minimised.minimize(loss, startup_program, parameter_list, no_grad_set)

    def get_hybrid_communicate_group(self) -> DataParallelGroups:
        """The degrees, ranks and groups of a job that is parallel in its data only."""
        joined, rank = self._joined(), self.placement.rank
        if self._hybrid is None or self._hybrid[0] is not joined:  # it may have been left, and joined anew
            alone = Group(-1, -1, [rank], name="alone")  # in Paddle a group of one has no members
            self._hybrid = joined, DataParallelGroups(rank, self.placement.nranks, self._everyone(), alone)
            topology._HYBRID_PARALLEL_GROUP = self._hybrid[1]  # where Paddle's layers look for it
        return self._hybrid[1]

    def _forget_hybrid(self) -> None:
        if self._hybrid and topology._HYBRID_PARALLEL_GROUP is self._hybrid[1]:
            topology._HYBRID_PARALLEL_GROUP = None
        self._hybrid = None

    @property
    def _hcg(self) -> DataParallelGroups:
        return self.get_hybrid_communicate_group()

    @property
    def _topology(self) -> Any:
        return self._hcg.topology()

    @property
    def _user_defined_strategy(self) -> Any:
        if self._strategy is None:
            self._strategy = DistributedStrategy()
        return self._strategy

    @property
    def hybrid_configs(self) -> Any:
        return self._user_defined_strategy.hybrid_configs

    @property
    def user_defined_optimizer(self) -> Any:
        """That was given to `distributed_optimizer` last."""
        return self._minimised

    @cached_property
    def _role_maker(self) -> Any:
        """A role maker of Paddle's that knows this rank's place."""
        given = self._given_role
        if not isinstance(given, RoleMakerBase):
            given = PaddleCloudRoleMaker(is_collective=self._is_collective)
        given._generate_role()
        return given

    def _final_strategy(self) -> dict[str, Any]:
        """Of static programs, as the following."""
        return {}

    def _get_applied_meta_list(self) -> list[str]:
        return []

    _get_applied_graph_list = _get_applied_meta_list

    def _everyone(self) -> Any:
        """The group of all ranks."""
        return Group(self.placement.rank, 0, list(range(self.placement.nranks)), name="_default_pg")

    def get_hybrid_parallel_topology(self) -> Any:
        return self.get_hybrid_communicate_group().topology()

    def _gathered(self, values: Any) -> Any:
        return self._joined().all_gather(values)


def told(endpoints: tuple[str, ...], to_string: bool) -> list[str] | str:
    return ",".join(endpoints) if to_string else list(endpoints)


def fleet_type(places: FleetPlaces) -> Any:
    """`Fleet`: the type of the one Fleet of a process, which is also what making another gives."""

    class OneFleet(type):
        def __instancecheck__(cls, candidate: object) -> bool:
            return isinstance(candidate, FleetPlaces) or getattr(candidate, "surface", None) is places

        def __call__(cls) -> FleetPlaces:
            return places

    return OneFleet("Fleet", (), {"__doc__": "The interface of one job; a process has one."})
