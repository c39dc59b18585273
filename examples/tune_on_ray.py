"""Which scheme is faster on this cluster of Ray's? Tune trains the same network under each, and prints the better one.

python examples/tune_on_ray.py [ADDRESS OF THE CLUSTER'S HEAD]
"""

import hashlib
import sys
import time

import ray
from ray import tune
from ray.train import ScalingConfig

from common.program.ray_train import PaddleConfig, PaddleTrainer

RANKS, STEPS, WARM_UP = 2, 30, 10


def train_loop():
    """Milliseconds a step (median), and the digest of the parameters."""
    import numpy as np
    import paddle
    import paddle.distributed as dist

    dist.init_parallel_env()
    paddle.seed(7)
    model = paddle.DataParallel(paddle.vision.models.LeNet())
    optimizer = paddle.optimizer.Adam(0.001, parameters=model.parameters())
    random = np.random.default_rng(dist.get_rank())
    took = []
    for _ in range(STEPS):
        images = paddle.to_tensor(random.random((32, 1, 28, 28), np.float32))
        labels = paddle.to_tensor(random.integers(0, 10, (32, 1)))
        begin = time.perf_counter()
        paddle.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.clear_grad()
        took.append(1e3 * (time.perf_counter() - begin))
    digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in model.parameters())).hexdigest()
    return float(np.median(took[WARM_UP:])), digest


def trial(config):
    scaling = ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 1})
    trainer = PaddleTrainer(train_loop, scaling_config=scaling, paddle_config=PaddleConfig(scheme=config["scheme"]))
    step_ms, digest = trainer.fit().return_value
    tune.report({"step_ms": step_ms, "digest": digest})


def main():
    ray.init(*sys.argv[1:2])
    tuner = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.1}),  # it waits for workers, which have their own
        param_space={"scheme": tune.grid_search(["ring", "ps"])},
        tune_config=tune.TuneConfig(metric="step_ms", mode="min", max_concurrent_trials=1),
    )
    results = tuner.fit()
    for result in results:
        print(f"{result.config['scheme']:5} {result.metrics['step_ms']:.1f} ms a step, {result.metrics['digest'][:12]}")
    print("better here:", results.get_best_result().config["scheme"])


if __name__ == "__main__":
    main()
