"""What `ps` and `collective` export for Paddle programs: Fleet's and paddle.distributed's names, written once.

A scheme makes one `FleetApi` with the function that connects it; `import ps as fleet` and `import collective as fleet`
then differ in nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from paddle.distributed.fleet.base.distributed_strategy import DistributedStrategy
from paddle.distributed.fleet.meta_optimizers import HybridParallelOptimizer

from common.credentials.credentials import current
from common.errors import UsageError
from common.launch.adopting import adopt
from common.launch.settings import Placement, Settings, placement_from, settings_from
from common.launch.tracing import parts_folder, recorder_for
from common.paddle_api.backward import forget, listen_to_backward
from common.paddle_api.communication import COMMUNICATION
from common.paddle_api.communication.communication import Communication
from common.paddle_api.communication.paddles_maps import PaddlesMaps
from common.paddle_api.communication.reduce_op import ReduceOp
from common.paddle_api.data_parallel import DataParallel
from common.paddle_api.fleet_places import FleetPlaces
from common.paddle_api.refusals import refuse_static
from common.paddle_api.roles import refuse_servers
from common.paddle_api.training_state import TrainingState
from common.paddle_api.wrapped_models import WrappedModels
from common.sync.local import LocalSynchronizer
from common.sync.synchronizer import Synchronizer
from common.system.mkl import set_cpu_type
from common.system.process import call_at_end, note_joining
from common.system.sigterm import end_in_order_on_sigterm, end_quietly_on_sigterm

__all__ = ["FleetApi", "ReduceOp"]


SPAWN_OPTIONS = {"start_method", "gpus", "xpus", "ips", "backend", "print_config"}  # of Paddle's spawn
SPAWN_OPTIONS |= {"selected_devices", "started_port", "cluster_node_ips", "node_ip", "use_paddlecloud"}


class Unwrapped:
    """Says at the first backward of a rank that has wrapped no model that nobody synchronises its gradients."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme

    def before_backward(self) -> None:
        forget(self)
        print(
            f"{self._scheme}: gradients are not synchronised, for no model was given to distributed_model or "
            f"DataParallel of {self._scheme}; every rank trains by itself unless the program sums them",
            file=sys.stderr,
        )

    def after_backward(self) -> None:
        """Nothing to do."""


class FleetApi(FleetPlaces):
    """The functions of one scheme in this process.

    Args:
        scheme: "ps" or "collective", as in messages.
        connect: joins the group at a placement of more than one rank.
    """

    DataParallel: Any
    DistributedStrategy = DistributedStrategy
    ReduceOp = ReduceOp

    def __init__(self, scheme: str, connect: Callable[[Placement], Synchronizer]) -> None:
        end_quietly_on_sigterm()
        set_cpu_type()  # where no launcher of ours has, so that all compute the same
        self._scheme, self._connect = scheme, connect
        self._synchronizer: Synchronizer | None = None
        self._process = os.getpid()  # which has joined
        self._models = WrappedModels(self._joined)
        self._unwrapped = Unwrapped(scheme)
        adopt()
        self.placement = placement_from()
        super().__init__()
        self._communication = Communication(self._joined, self._may_pickle, PaddlesMaps())
        api = self

        class BoundDataParallel(DataParallel):
            __doc__ = DataParallel.__doc__

            def __init__(self, layers: Any, *args: Any, **kwargs: Any) -> None:
                super().__init__(layers, *args, models=api._models, **kwargs)
                forget(api._unwrapped)

        BoundDataParallel.__name__ = BoundDataParallel.__qualname__ = "DataParallel"
        self.DataParallel = BoundDataParallel

        class BoundTrainingState(TrainingState):
            __doc__ = TrainingState.__doc__

            def __init__(self, **state: Any) -> None:
                super().__init__(**state, joined=api._joined, models=api._models)

        BoundTrainingState.__name__ = BoundTrainingState.__qualname__ = "TrainingState"
        self.TrainingState = BoundTrainingState

    def __getattr__(self, name: str) -> Any:
        if name in COMMUNICATION:
            return getattr(self._communication, name)
        words = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name.startswith("_") and not name.startswith("__"):
            words += "; it is of Paddle's pipeline, tensor or sharding parallelism, of which GradSync has none"
        raise AttributeError(words)

    def init(
        self, role_maker: Any = None, is_collective: bool = False, strategy: Any = None, log_level: Any = "INFO"
    ) -> Any:
        """Join the group that the launcher started; blocks until all ranks have. As fleet.init.

        Raises:
            UsageError: the role maker is one for parameter servers, or the strategy asks for more than data
                parallelism.
        """
        refuse_servers(role_maker)
        self._begin(role_maker, strategy, log_level, is_collective=is_collective)
        self.init_parallel_env()
        self.get_hybrid_communicate_group()
        return self

    def init_parallel_env(self, backend: Any = None) -> Any:
        """Join the group that the launcher started; blocks until all ranks have. Returns the group of all ranks.

        Args:
            backend: "gloo" or "nccl", or Paddle's settings of NCCL; without effect, for the launcher has chosen.
        """
        if self._synchronizer is None:
            self._process = os.getpid()
            note_joining(self.placement.nranks)
            alone = self.placement.nranks == 1 and not self.placement.servers
            self._synchronizer = LocalSynchronizer() if alone else self._connect(self.placement)
            if parts_folder():
                self._synchronizer.trace = recorder_for(self._synchronizer)
                end_in_order_on_sigterm()
            if self._synchronizer.rank == 0 and self._synchronizer.nranks > 1 and not self._models:
                listen_to_backward(self._unwrapped)
            call_at_end(self.leave)
        return self.get_group()

    def is_initialized(self) -> bool:
        return self._synchronizer is not None

    def distributed_model(self, model: Any) -> Any:
        """The model, wrapped in DataParallel.

        Raises:
            UsageError: as of DataParallel.
        """
        return self.DataParallel(model)

    def distributed_optimizer(self, optimizer: Any, strategy: Any = None) -> Any:
        """The optimizer, whose gradients are averaged; of several ranks within Paddle's own type for it, which has it
        as `_inner_opt` and changes nothing.

        Raises:
            UsageError: it updates nothing of the models that were wrapped before, the strategy asks for more, or the
                program builds a static graph.
        """
        refuse_static("distributed_optimizer")
        self._check(strategy)
        self._minimised = optimizer
        if strategy is not None:
            self._strategy = strategy
        if self._models:
            mine = self._models.owned()
            theirs = [p for p in optimizer._parameter_list or [] if not isinstance(p, dict)]
            if theirs and not any(id(p) in mine for p in theirs):
                raise UsageError(
                    "distributed_optimizer: the optimizer has no parameter of the model given to distributed_model; "
                    "make it with parameters=model.parameters()"
                )
        if not self.is_initialized() or self.worker_num() == 1:  # a server's, or of one worker
            return optimizer
        return HybridParallelOptimizer(optimizer, self._hcg, self._user_defined_strategy)

    def distributed_scaler(self, scaler: Any) -> Any:
        """The scaler as it is: all ranks see the same averaged gradients, and so the same overflows."""
        return scaler

    def _everyone(self) -> Any:
        return self.get_group()

    def get_rank(self, group: Any = None) -> int:
        return self.placement.rank if group is None else int(group.rank)

    def get_world_size(self, group: Any = None) -> int:
        return self.placement.nranks if group is None else int(group.world_size)

    def spawn(
        self,
        func: Any,
        args: tuple[Any, ...] = (),
        nprocs: int = -1,
        join: bool = True,
        daemon: bool = False,
        *,
        servers: int = 1,
        **options: Any,
    ) -> Any:
        """Run `func(*args)` on `nprocs` ranks, each a new process; as paddle.distributed.spawn, whose other options
        choose devices and back ends, and have no effect. Where a launcher has started this process as one of so many
        ranks, `func` is run here, as this rank.

        Args:
            servers: number of parameter servers beside them, under `ps`.

        Raises:
            ValueError: an option that Paddle does not have either.
            UsageError: this process is one of another number of ranks.
        """
        from common.launch.spawning import spawn

        if unknown := sorted(options.keys() - SPAWN_OPTIONS):
            raise ValueError(f"spawn: the option {unknown[0]} is not supported")
        if (nranks := self.placement.nranks) > 1:
            if nprocs not in (-1, nranks):
                raise UsageError(
                    f"spawn: the program asks for {nprocs} processes, but was started as {nranks} ranks; "
                    f"start it with --nranks {nprocs}"
                )
            func(*args)
            return None if join else SimpleNamespace(processes=[], join=lambda *_, **__: True)
        limits = settings_from(Settings)
        return spawn(
            self._scheme,
            func,
            args,
            nprocs=nprocs,
            join=join,
            servers=servers,
            timeout=limits.timeout,
            wait_limit=limits.wait_limit,
        )

    def _joined(self) -> Synchronizer:
        if self._synchronizer is None:
            self.init_parallel_env()
        assert self._synchronizer is not None
        return self._synchronizer

    def _may_pickle(self) -> bool:
        """
        Raises:
            UsageError: that is asked for, but whoever reaches a port could be a rank.
        """
        if not settings_from(Settings).allow_pickle:
            return False
        if not current().secure:
            raise UsageError("--allow-pickle works among processes with credentials only: leave it out, or --insecure")
        return True

    def destroy_process_group(self, group: Any = None) -> None:
        """Forget a group of new_group's; without one, or with that of all ranks, leave."""
        if group is None or group.id == 0:
            self.leave()
        else:
            self._communication.destroy(group)

    def leave(self) -> None:
        """Leave the group, which is done at the end otherwise; after an exception the others learn of it. A forked
        child has no part in it, so nothing to leave."""
        if os.getpid() != self._process:
            return
        if self._synchronizer is not None:
            self._synchronizer.trace.leave(parts_folder())
            failed = getattr(sys, "last_value", None)
            self._synchronizer.close("" if failed is None else f"{type(failed).__name__}: {failed}")
            self._synchronizer = None
            self._communication.left()
            self._forget_hybrid()
        forget(self._unwrapped)
        self._models.stop()
