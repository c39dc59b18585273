"""A cluster of three nodes of Ray's on this machine: a training under each scheme, and one that loses a worker."""

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


def loop(config: dict[str, Any]) -> list[float]:
    import paddle
    import paddle.distributed as dist
    from ray import train

    dist.init_parallel_env()
    paddle.seed(7)
    model = paddle.DataParallel(paddle.nn.Linear(4, 3))
    optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    for step in range(3):
        x = paddle.to_tensor([[1.0 + dist.get_rank(), step, 2.0, 3.0]])
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        train.report({"loss": float(loss)})
        if (file := config.get("dies_once")) and step == 1 and dist.get_rank() == 1 and not os.path.exists(file):
            open(file, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    return [float(value) for value in model.parameters()[0].numpy().ravel()]


def fit(scheme: str, storage: str, **config: str) -> list[float]:
    trainer = PaddleTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}, placement_strategy="SPREAD"),
        paddle_config=PaddleConfig(scheme=scheme, servers=1),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=1)),
    )
    return list(trainer.fit().return_value)


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    with tempfile.TemporaryDirectory() as storage:
        found = {scheme: fit(scheme, storage) for scheme in ("ring", "ps")}
        found["after a kill"] = fit("ring", storage, dies_once=f"{storage}/died")
        assert os.path.exists(f"{storage}/died")
    print(json.dumps(found))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
