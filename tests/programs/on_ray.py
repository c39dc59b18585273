"""A cluster of three nodes of Ray's on this machine: MNIST's network under each scheme, and once with a lost worker."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig

from common.program.ray_train import PaddleConfig, PaddleTrainer

STORE_BYTES = 100_000_000  # of each node's objects


def loop(config: dict[str, Any]) -> str:
    import paddle.distributed as dist
    from ray import train

    from tests.programs.cnn import train as train_cnn

    def report(step: int, loss: float) -> None:
        train.report({"loss": loss})
        if (file := config.get("dies_once")) and step == 1 and dist.get_rank() == 1 and not os.path.exists(file):
            open(file, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

    return train_cnn(config["steps"], report)


def fit(scheme: str, storage: str, **config: Any) -> str:
    trainer = PaddleTrainer(
        loop,
        train_loop_config={"steps": 5, **config},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}, placement_strategy="SPREAD"),
        paddle_config=PaddleConfig(scheme=scheme, servers=1),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=1)),
    )
    return str(trainer.fit().return_value)


def main() -> None:
    node = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        with tempfile.TemporaryDirectory() as storage:
            found = {scheme: fit(scheme, storage) for scheme in ("ring", "ps")}
            found["after a kill"] = fit("ring", storage, dies_once=f"{storage}/died")
            assert os.path.exists(f"{storage}/died")
        print(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
