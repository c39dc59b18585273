"""`PaddleTrainer`: a Paddle training loop on Ray Train, under either scheme (extra `ray`).

    from common.program.ray_train import PaddleConfig, PaddleTrainer

    scaling, paddle = ScalingConfig(num_workers=4), PaddleConfig(scheme="ps")
    result = PaddleTrainer(train_loop, scaling_config=scaling, paddle_config=paddle).fit()

The loop uses `paddle.distributed`, `fleet` or `paddle.DataParallel` as under our launchers. Ray places, watches and
restarts the workers; servers are actors, spread over the nodes in a placement group of their own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from common.credentials.credentials import TOKEN_VARIABLE
from common.credentials.token import new_token
from common.errors import PeerUnreachable, UsageError, choose
from common.launch.ranks import FIRST_PORT, abstract_address, paddle_environment
from common.launch.settings import Placement, Settings, variables_of
from common.program.install import install
from common.program.ray_gauges import shown
from common.system.addresses import address_of, host_identity
from common.system.process import prepare_process
from common.system.sigterm import ENGINE_VARIABLE

__all__ = ["PaddleConfig", "PaddleTrainer"]

SCHEMES = {"ring": "collective", "collective": "collective", "ps": "ps"}  # as reports and as packages call them


@dataclass
class PaddleConfig(BackendConfig):  # type: ignore[misc] # Ray has no types
    """How the workers synchronise.

    Args:
        scheme: "ring" or "ps".
        servers: how many, under ps.
        resources_per_server: what each is given by Ray.
        timeout: how long a process is waited for that has not joined, in seconds; servers also wait so long for a node.
        token: the job's secret, which its processes get through Ray; by default a new one.

    Raises:
        UsageError: a value that cannot be.
    """

    scheme: str = "ring"
    servers: int = 1
    resources_per_server: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    timeout: float = 60.0
    token: str = field(default_factory=new_token, repr=False)

    def __post_init__(self) -> None:
        choose("scheme", self.scheme, SCHEMES)
        if self.servers < 1:
            raise UsageError(f"servers must be at least 1 (got {self.servers})")
        _ = self.settings

    @property
    def settings(self) -> Settings:
        return Settings(timeout=self.timeout)

    @property
    def backend_cls(self) -> type[Backend]:
        return PaddleBackend

    def to_dict(self) -> dict[str, Any]:
        """What Ray's dashboard may show: not the token."""
        return {"scheme": self.scheme, "servers": self.servers if self.scheme == "ps" else 0}


class PaddleTrainer(DataParallelTrainer):  # type: ignore[misc] # Ray has no types
    """As Ray's other trainers.

    Args:
        train_loop_per_worker: run on each worker, as one rank.
        paddle_config: how they synchronise.
        options: those of DataParallelTrainer: train_loop_config, run_config, datasets, dataset_config, ...
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        paddle_config: PaddleConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            backend_config=paddle_config or PaddleConfig(),
            scaling_config=scaling_config,
            **options,
        )


class Server:
    """An actor that is a parameter server of one training."""

    def __init__(self, token: str) -> None:
        os.environ[TOKEN_VARIABLE] = token
        prepare_process()
        self._listening = threading.Event()
        self._address = ""

    def serve(self, nranks: int, shard: tuple[int, int], limits: Settings) -> None:
        """Returns when all trainers have left."""
        address = address_of(get_node_ip_address(), 0)
        serving: Any = import_module("ps.serving")  # ps stands on common, not the other way round
        metrics: Any = import_module("ps.coordinator.metrics")
        job = ray.get_runtime_context().get_job_id()
        with ExitStack() as stack:

            def listens(server: Any) -> None:
                figures = metrics.StatusCollector(server.status)
                stack.enter_context(shown(figures.collect, {"server": str(shard[0]), "job": job}))
                self._tell(server.address)

            serving.serve(address, nranks, shard=shard, limits=limits, once_it_listens=listens)

    def address(self, seconds: float) -> str:
        """HOST:PORT, once it listens; "" after so many seconds."""
        self._listening.wait(seconds)
        return self._address

    def _tell(self, address: str) -> None:
        self._address = address
        self._listening.set()


class PaddleBackend(Backend):  # type: ignore[misc] # Ray has no types
    """Makes each worker of a group a rank; runs in Ray's controller of the training."""

    def __init__(self) -> None:
        self._servers: list[Any] = []
        self._group: PlacementGroup | None = None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        config: PaddleConfig = backend_config
        nranks, scheme = len(worker_group), SCHEMES[config.scheme]
        told = worker_group.execute(where)
        hosts = [host for host, _, _ in told]
        endpoints = [address_of(host, FIRST_PORT + hosts[:rank].count(host)) for rank, host in enumerate(hosts)]
        if scheme == "ps":
            place = Placement(servers=self._start_servers(config, nranks))
        else:
            alone = len({identity for _, _, identity in told}) == 1  # they share memory
            place = Placement(rendezvous=abstract_address("ring") if alone else address_of(*told[0][:2]))
        shared = {**place.variables(), **variables_of(Settings, config.settings), TOKEN_VARIABLE: config.token}
        ray.get(
            [
                worker_group.execute_single_async(
                    rank,
                    become,
                    scheme,
                    {
                        **shared,
                        **paddle_environment(
                            rank, endpoints, nnodes=len({*hosts}), local=hosts[:rank].count(hosts[rank])
                        ),
                        ENGINE_VARIABLE: "Ray",
                    },
                )
                for rank in range(nranks)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Ranks leave; servers end with them."""
        with suppress(Exception):  # a worker may be gone
            worker_group.execute(leave, SCHEMES[backend_config.scheme])
        for server in self._servers:
            ray.kill(server)
        if self._group is not None:
            remove_placement_group(self._group)
        self._servers, self._group = [], None

    def _start_servers(self, config: PaddleConfig, nranks: int) -> tuple[str, ...]:
        """The addresses of new ones.

        Raises:
            UsageError: the cluster has no room for them.
            PeerUnreachable: one does not start.
        """
        count = config.servers
        self._group = placement_group([dict(config.resources_per_server)] * count, strategy="SPREAD")
        if not self._group.wait(config.timeout):
            raise UsageError(
                f"Ray has had no room for {count} server(s) of {dict(config.resources_per_server)} beside {nranks} "
                f"workers for {config.timeout:g} s: give fewer of either, or smaller ones (resources_per_server)"
            )
        for index in range(count):
            bundle = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            resources = dict(config.resources_per_server)
            cores = resources.pop("CPU", 0)
            memory = resources.pop("memory", None)
            actor: Any = ray.remote(Server).options(
                num_cpus=cores, memory=memory, resources=resources, scheduling_strategy=bundle, max_concurrency=2
            )
            self._servers.append(actor.remote(config.token))
        for index, server in enumerate(self._servers):
            server.serve.remote(nranks, (index, count), config.settings)
        addresses = ray.get([server.address.remote(config.timeout) for server in self._servers])
        if late := [index for index, address in enumerate(addresses) if not address]:
            raise PeerUnreachable(f"server {late[0]} did not start within {config.timeout:g} s; Ray's log says why")
        return tuple(addresses)


def where() -> tuple[str, int, str]:
    """This worker's address, a port that is free there, and what is equal for workers of one host."""
    utils: Any = import_module("ray.train._internal.utils")
    host, port = utils.get_address_and_port()
    return str(host), int(port), host_identity(str(host))


def become(scheme: str, variables: dict[str, str]) -> None:
    """Have this worker be a rank of the scheme."""
    os.environ.update(variables)
    prepare_process(of_user=True)
    install(scheme)


def leave(scheme: str) -> None:
    import_module(f"{scheme}.fleet").surface.leave()
