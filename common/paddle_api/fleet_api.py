"""What `ps` and `collective` export for Paddle programs: Fleet's and paddle.distributed's names, written once.

A scheme makes one `FleetApi` with the function that connects it; `import ps as fleet` and `import collective as fleet`
then differ in nothing else.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
from paddle.distributed.fleet.base.distributed_strategy import DistributedStrategy

from common.errors import UsageError
from common.launch.settings import Placement, Settings, placement_from, settings_from
from common.launch.tracing import parts_folder, recorder_for
from common.paddle_api.backward import forget, listen_to_backward
from common.paddle_api.data_parallel import DataParallel
from common.paddle_api.fleet_places import FleetPlaces
from common.paddle_api.roles import refuse_servers
from common.paddle_api.strategy import check_strategy
from common.paddle_api.wrapped_models import WrappedModels
from common.sync.local import LocalSynchronizer
from common.sync.synchronizer import Synchronizer
from common.system.mkl import set_cpu_type
from common.system.process import note_joining
from common.system.sigterm import end_in_order_on_sigterm, end_quietly_on_sigterm

__all__ = ["FleetApi", "ReduceOp"]


class ReduceOp:
    """What `all_reduce` computes."""

    SUM, MAX, MIN, PROD, AVG = range(5)


REDUCTIONS: dict[int, Callable[[Any], Any]] = {
    ReduceOp.SUM: lambda a: a.sum(0, dtype=a.dtype),
    ReduceOp.MAX: lambda a: a.max(0),
    ReduceOp.MIN: lambda a: a.min(0),
    ReduceOp.PROD: lambda a: a.prod(0, dtype=a.dtype),
    ReduceOp.AVG: lambda a: a.mean(0, dtype=a.dtype),
}


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
        self.placement = placement_from()
        super().__init__()
        api = self

        class BoundDataParallel(DataParallel):
            __doc__ = DataParallel.__doc__

            def __init__(self, layers: Any, *args: Any, **kwargs: Any) -> None:
                super().__init__(layers, *args, models=api._models, **kwargs)
                forget(api._unwrapped)

        BoundDataParallel.__name__ = BoundDataParallel.__qualname__ = "DataParallel"
        self.DataParallel = BoundDataParallel

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
        return self

    def init_parallel_env(self, backend: Any = None) -> Any:
        """Join the group that the launcher started; blocks until all ranks have. Returns a ParallelEnv.

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
            atexit.register(self.leave)
        return self.ParallelEnv()

    def is_initialized(self) -> bool:
        return self._synchronizer is not None

    def distributed_model(self, model: Any) -> Any:
        """The model, wrapped in DataParallel."""
        return self.DataParallel(model)

    def distributed_optimizer(self, optimizer: Any, strategy: Any = None) -> Any:
        """The optimizer as it is: its gradients are averaged, and everything else is Paddle's own doing.

        Raises:
            UsageError: it updates nothing of the models that were wrapped before, or the strategy asks for more.
        """
        check_strategy(strategy, self.placement.nranks)
        self._minimised = optimizer
        if self._models:
            mine = self._models.owned()
            theirs = [p for p in optimizer._parameter_list or [] if not isinstance(p, dict)]
            if theirs and not any(id(p) in mine for p in theirs):
                raise UsageError(
                    "distributed_optimizer: the optimizer has no parameter of the model given to distributed_model; "
                    "make it with parameters=model.parameters()"
                )
        return optimizer

    def distributed_scaler(self, scaler: Any) -> Any:
        """The scaler as it is: all ranks see the same averaged gradients, and so the same overflows."""
        return scaler

    def get_rank(self, group: Any = None) -> int:
        return self.placement.rank

    def get_world_size(self, group: Any = None) -> int:
        return self.placement.nranks

    def barrier(self, group: Any = None) -> None:
        """Block until every rank has called it."""
        self._joined().all_gather(np.zeros(1, np.uint8))

    def all_reduce(self, tensor: Any, op: int = ReduceOp.SUM, group: Any = None, sync_op: bool = True) -> None:
        """Replace a Paddle tensor by its sum (or max, min, product, mean) over ranks; for metrics, not for bulk."""
        if op not in REDUCTIONS:
            raise ValueError(f"op must be one of ReduceOp's (got {op!r})")
        narrow = tensor.dtype == paddle.bfloat16  # of which NumPy has only the bits
        gathered = self._joined().all_gather((tensor.astype("float32") if narrow else tensor).numpy())
        found = np.asarray(REDUCTIONS[op](gathered))  # of a tensor without dimensions NumPy makes a number
        tensor.set_value(paddle.to_tensor(found).astype("bfloat16") if narrow else found)

    def broadcast(self, tensor: Any, src: int = 0, group: Any = None, sync_op: bool = True) -> None:
        """Replace a Paddle tensor by rank `src`'s."""
        tensor.set_value(np.asarray(self._joined().all_gather(tensor.numpy())[src]))

    def all_gather(self, tensor_list: list[Any], tensor: Any, group: Any = None, sync_op: bool = True) -> None:
        """Every rank's tensor, in rank order, becomes the content of `tensor_list`: of the tensors in it, or, if it is
        empty, of new ones."""
        gathered = self._joined().all_gather(tensor.numpy())
        if not tensor_list:
            tensor_list.extend(paddle.empty_like(tensor) for _ in gathered)
        if len(tensor_list) != len(gathered):
            expected = f"be empty or hold a tensor for each of {len(gathered)} ranks"
            raise ValueError(f"all_gather: tensor_list must {expected} (it holds {len(tensor_list)})")
        for each, row in zip(tensor_list, gathered, strict=True):
            each.set_value(np.asarray(row))

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

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the group."""
        self.leave()

    def leave(self) -> None:
        """Leave the group, which `atexit` does otherwise; after an exception the others learn of it. A forked child has
        no part in it, so nothing to leave."""
        if os.getpid() != self._process:
            return
        if self._synchronizer is not None:
            self._synchronizer.trace.leave(parts_folder())
            failed = getattr(sys, "last_value", None)
            self._synchronizer.close("" if failed is None else f"{type(failed).__name__}: {failed}")
            self._synchronizer = None
        forget(self._unwrapped)
        self._models.stop()
