"""MNIST's network on a cluster of three nodes of Ray's: under each scheme, and with a lost worker and node; with the
address of a cluster only the former, there."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig

from common.program.ray_train import PaddleConfig, PaddleTrainer
from tests.support.ray_cluster import ANY_MEMORY

LOST_S = 120.0  # whoever waits to be lost with its node is, by then
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
        if (file := config.get("node_dies_once")) and step == 1 and not os.path.exists(file):
            node = ray.get_runtime_context().get_node_id()
            if node != config["head"]:
                Path(f"{file}.draft").write_text(node)
                os.rename(f"{file}.draft", file)
                time.sleep(LOST_S)

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


def lose_node(cluster: Cluster, file: Path) -> None:
    """Kill the node that is named in the file, once it is there."""
    deadline = time.monotonic() + LOST_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    node = file.read_text()
    cluster.remove_node(next(each for each in cluster.worker_nodes if each.node_id == node), allow_graceful=False)


def fit_on(address: str) -> None:
    """Under each scheme, on a cluster that is there."""
    ray.init(address=address, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as storage:
            print(json.dumps({scheme: fit(scheme, storage) for scheme in ("ring", "ps")}))
    finally:
        ray.shutdown()


def main() -> None:
    os.environ |= ANY_MEMORY
    if sys.argv[1:]:
        fit_on(sys.argv[1])
        return
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
            lost = Path(storage, "lost")
            killer = threading.Thread(target=lose_node, args=(cluster, lost), daemon=True)
            killer.start()
            head = cluster.head_node.node_id
            found["after a lost node"] = fit("ring", storage, node_dies_once=str(lost), head=head)
            killer.join(0)
            assert not killer.is_alive()
        print(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
