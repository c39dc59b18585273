"""Programs as users have them, for Paddle's own groups; none knows of us. Prints its rank and its parameters' digest.

unchanged.py KIND [MODULE]: with a module's functions instead of paddle.distributed's, as after a changed import.
"""

import hashlib
import importlib
import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed import fleet, init_parallel_env
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients


class Samples(paddle.io.Dataset):
    def __init__(self):
        random = np.random.default_rng(1)
        self.x, self.y = random.random((48, 8), np.float32), random.integers(0, 4, (48, 1))

    def __getitem__(self, index):
        return self.x[index], self.y[index]

    def __len__(self):
        return len(self.x)


def net_of(rank):
    paddle.seed(7 + rank)  # rank 0's parameters must win
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1D(16), nn.ReLU(), nn.Linear(16, 4))


def train(model, optimizer, after_backward=lambda: None):
    batches = paddle.io.DistributedBatchSampler(Samples(), batch_size=4, shuffle=True)
    loader = paddle.io.DataLoader(Samples(), batch_sampler=batches)
    for _ in range(2):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            after_backward()
            optimizer.step()
            optimizer.clear_grad()


def data_parallel(other):
    init = other.init_parallel_env if other else init_parallel_env
    init()
    net = net_of((other or dist).get_rank())
    model = (other or paddle).DataParallel(net)
    train(model, paddle.optimizer.Adam(0.01, parameters=model.parameters()))
    return net


def with_fleet(other):
    api = other or fleet
    strategy = api.DistributedStrategy()
    strategy.find_unused_parameters = True
    api.init(is_collective=True, strategy=strategy)
    net = net_of(api.worker_index())
    optimizer = paddle.optimizer.Momentum(0.05, parameters=net.parameters())
    train(api.distributed_model(net), api.distributed_optimizer(optimizer))
    return net


def prepared():
    net = net_of(dist.get_rank())
    rate = paddle.optimizer.lr.StepDecay(0.01, step_size=4, gamma=0.5)
    model = paddle.Model(net)
    optimizer = paddle.optimizer.Adam(rate, parameters=net.parameters())
    model.prepare(optimizer, nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    return net, model


SETTINGS = {"batch_size": 4, "verbose": 0, "shuffle": True}


def fit(_):
    """With metrics, callbacks, evaluation, and checkpoints."""
    net, model = prepared()
    callbacks = [paddle.callbacks.LRScheduler(by_step=True), paddle.callbacks.EarlyStopping("acc", "max", patience=9)]
    model.fit(Samples(), Samples(), epochs=2, save_dir="checkpoints", save_freq=1, callbacks=callbacks, **SETTINGS)
    print("EVALUATED", model.evaluate(Samples(), batch_size=4, verbose=0), flush=True)
    return net


def resume(_):
    """Goes on from a checkpoint of `fit`."""
    net, model = prepared()
    model.load("checkpoints/0")
    model.fit(Samples(), epochs=1, **SETTINGS)
    return net


def fused(_):
    dist.init_parallel_env()
    net = net_of(dist.get_rank())
    model = paddle.DataParallel(net)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())

    def reduce():
        fused_allreduce_gradients(list(model.parameters()), None)

    with model.no_sync():
        train(model, optimizer, reduce)
    return net


def spawned(_):
    dist.spawn(run, args=("data_parallel", None), nprocs=2)


def digest_of(net):
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in net.parameters())).hexdigest()


def run(kind, other):
    kinds = {
        "data_parallel": data_parallel,
        "fleet": with_fleet,
        "fit": fit,
        "resume": resume,
        "fused": fused,
        "spawn": spawned,
    }
    net = kinds[kind](importlib.import_module(other) if other else None)
    if net is not None:
        print(f"RESULT {dist.get_rank()} {digest_of(net)}", flush=True)


if __name__ == "__main__":
    run(sys.argv[1], *sys.argv[2:] or [None])
