"""A loop on shards of Ray Data with checkpoints, under each scheme; and a server's figures, as Ray tells them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import ray
from prometheus_client.parser import text_string_to_metric_families
from ray.train import Checkpoint, RunConfig, ScalingConfig

from common.program.ray_train import PaddleConfig, PaddleTrainer
from tests.support.ray_cluster import ANY_MEMORY

ROWS, EPOCHS, BATCH = 64, 2, 8
LIMIT_S = 60.0
STEPS = "ray_gradsync_steps_total"


def loop(config: dict[str, Any]) -> int:
    import numpy as np
    import paddle
    import paddle.distributed as dist
    from ray import train

    dist.init_parallel_env()
    paddle.seed(7)
    model = paddle.DataParallel(paddle.nn.Linear(4, 3))
    optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    seen = 0
    for _ in range(EPOCHS):
        for batch in train.get_dataset_shard("train").iter_batches(batch_size=BATCH, batch_format="numpy"):
            loss = model(paddle.to_tensor(np.stack([batch["id"]] * 4, 1).astype("float32") / ROWS)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            seen += len(batch["id"])
        with tempfile.TemporaryDirectory() as folder:
            paddle.save(model.state_dict(), f"{folder}/model.pdparams")
            mine = Checkpoint.from_directory(folder) if dist.get_rank() == 0 else None
            train.report({"loss": float(loss)}, checkpoint=mine)
    deadline = time.monotonic() + LIMIT_S
    while config["until"] and not os.path.exists(config["until"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return seen


def fit(scheme: str, storage: str, until: str = "") -> Any:
    return PaddleTrainer(
        loop,
        train_loop_config={"until": until},
        datasets={"train": ray.data.range(ROWS)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        paddle_config=PaddleConfig(scheme=scheme),
        run_config=RunConfig(storage_path=storage),
    ).fit()


def read_figures(told: Path, found: dict[str, float]) -> None:
    """Ask Ray's node until it tells of all steps, or too late."""
    deadline = time.monotonic() + LIMIT_S
    while found.get(STEPS, 0) < EPOCHS * ROWS / 2 / BATCH and time.monotonic() < deadline:
        time.sleep(0.2)
        node = ray.nodes()[0]
        address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        try:
            text = urllib.request.urlopen(address, timeout=2).read().decode()
        except OSError:
            continue
        for family in text_string_to_metric_families(text):
            found.update({sample.name: sample.value for sample in family.samples if "_gradsync_" in sample.name})
    told.touch()


def main() -> None:
    os.environ |= {"RAY_AUTH_MODE": "disabled", **ANY_MEMORY}
    often = {"metrics_report_interval_ms": 500}
    ray.init(num_cpus=5, include_dashboard=False, log_to_driver=False, _system_config=often)
    found: dict[str, float] = {}
    try:
        with tempfile.TemporaryDirectory() as storage:
            told = Path(storage, "told")
            reader = threading.Thread(target=read_figures, args=(told, found), daemon=True)
            reader.start()
            results = {"ps": fit("ps", storage, str(told)), "ring": fit("ring", storage)}
            reader.join()
            kept = {scheme: os.listdir(result.checkpoint.path) for scheme, result in results.items()}
        seen = {scheme: result.return_value for scheme, result in results.items()}
        print(json.dumps({"seen": seen, "kept": kept, "figures": found}))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
