"""Paddle programs with what users expect to work beside data parallelism; the first argument names one of them.

Each prints `RESULT rank ...` lines, the same under every scheme, and `NOTE ...` lines."""

import hashlib
import multiprocessing
import os
import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.utils import recompute
from paddle.io import DataLoader, Dataset, DistributedBatchSampler


class Points(Dataset):
    """Samples that tell which process has made them."""

    def __init__(self, count, seed):
        super().__init__()
        self.x = np.random.default_rng(seed).random((count, 6), np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], np.int64(self.x[index].sum() > 3), np.int64(os.getpid())


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1D(16), nn.ReLU(), nn.Dropout(0.1))
        self.blocks = nn.LayerList([nn.Linear(16, 16) for _ in range(2)])
        self.head = nn.Linear(16, 2)

    def forward(self, x, recomputed=False):
        x = self.body(x)
        for block in self.blocks:
            x = x + paddle.tanh(recompute(block, x) if recomputed else block(x))
        return self.head(x)


def digest(arrays):
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()[:20]


def parameters_of(net):
    return digest(p.numpy() for p in net.parameters())


def result(*words):
    print("RESULT", dist.get_rank(), *words, flush=True)


def mean_over_ranks(value):
    value = paddle.to_tensor(value, dtype="float32")
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def start(seed=7):
    dist.init_parallel_env()
    paddle.seed(seed + dist.get_rank())
    return Net()


def epochs():
    """DataLoader workers in mid-training, with and without shared memory; evaluation, metrics, schedulers."""
    net = start()
    model = paddle.DataParallel(net)
    schedule = paddle.optimizer.lr.LinearWarmup(paddle.optimizer.lr.StepDecay(0.05, 2, 0.9), 3, 0.01, 0.05)  # by batch
    optimizer = paddle.optimizer.Adam(schedule, parameters=model.parameters())
    points = Points(48, 1)
    sampler = DistributedBatchSampler(points, 4, shuffle=True)
    makers = set()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        workers = 0 if epoch == 0 else 2
        loader = DataLoader(points, batch_sampler=sampler, num_workers=workers, use_shared_memory=epoch != 2)
        model.train()
        rates = []
        for batch, (x, y, pids) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            everyone = []
            dist.all_gather(everyone, loss.detach().reshape([1]))  # between backward and step
            average = mean_over_ranks(float(loss))
            optimizer.step()
            optimizer.clear_grad()
            rates.append(round(optimizer.get_lr(), 6))
            schedule.step()
            makers |= set(pids.numpy().tolist()) - {os.getpid()}
            if epoch == 3 and batch == 2:
                break  # its workers have more to give
        result("trained", epoch, digest(t.numpy() for t in everyone), f"{average:.9f}", *rates)
        model.eval()
        with paddle.no_grad():
            correct = sum(float((model(x).argmax(1) == y).sum()) for x, y, _ in DataLoader(points, batch_size=16))
        result("evaluated", epoch, mean_over_ranks(correct), parameters_of(net))
        del loader
        assert epoch == 3 or not multiprocessing.active_children()
    print("NOTE processes", os.getpid(), *makers, flush=True)


def accumulation():
    """AMP with a scaler, gradients of several backwards with and without no_sync, recomputation, a plateau."""
    net = start()
    model = paddle.DataParallel(net)
    schedule = paddle.optimizer.lr.ReduceOnPlateau(0.05, factor=0.8, patience=0)
    optimizer = paddle.optimizer.Momentum(schedule, parameters=model.parameters(), weight_decay=1e-3)
    scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)
    if "plain" not in sys.argv:  # Paddle's wants fleet.init, and its DataParallel knows no recomputation
        scaler = fleet.distributed_scaler(scaler)
    random = np.random.default_rng(dist.get_rank())

    def backward(recomputed=False):
        x = paddle.to_tensor(random.random((5, 6), np.float32))
        y = paddle.to_tensor(random.integers(0, 2, 5))
        with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
            out = model(x, recomputed and "plain" not in sys.argv)
            loss = nn.functional.cross_entropy(out, y)
        scaler.scale(loss).backward()
        return float(loss)

    for step in range(7):
        losses = []
        if step in (3, 5):
            for _ in range(2):
                with model.no_sync():
                    losses.append(backward())
        if step in (4, 5):
            losses.append(backward())
        losses.append(backward(recomputed=step in (1, 2, 6)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        schedule.step(mean_over_ranks(sum(losses) / len(losses)))
        result("step", step, f"{optimizer.get_lr():.9f}", parameters_of(net))


def resume(folder, begin, end):
    """Steps `begin`..`end` of ten; from a checkpoint if not from the start. Rank 0 saves one before the sixth."""
    net = start(seed=7 + begin)  # a restart knows nothing of the old values
    model = paddle.DataParallel(net)
    schedule = paddle.optimizer.lr.ExponentialDecay(0.05, 0.8)
    optimizer = paddle.optimizer.Adam(schedule, parameters=model.parameters(), weight_decay=1e-3)
    statistics = [p for p in net.parameters() if p.stop_gradient]  # BatchNorm's, which each rank has its own of
    if begin:
        model.set_state_dict(paddle.load(f"{folder}/model.pdparams"))
        optimizer.set_state_dict(paddle.load(f"{folder}/optimizer.pdopt"))
        for statistic, value in zip(statistics, np.load(f"{folder}/{dist.get_rank()}.npz").values(), strict=True):
            statistic.set_value(value)
    for step in range(begin, end):
        random = np.random.default_rng([step, dist.get_rank()])
        paddle.seed(step)
        if step == 5 and not begin:
            if dist.get_rank() == 0:
                os.makedirs(folder, exist_ok=True)
                paddle.save(model.state_dict(), f"{folder}/model.pdparams")
                paddle.save(optimizer.state_dict(), f"{folder}/optimizer.pdopt")
            dist.barrier()
            np.savez(f"{folder}/{dist.get_rank()}.npz", *[each.numpy() for each in statistics])
        x = paddle.to_tensor(random.random((5, 6), np.float32))
        nn.functional.cross_entropy(model(x), paddle.to_tensor(random.integers(0, 2, 5))).backward()
        optimizer.step()
        optimizer.clear_grad()
        schedule.step()
        if step >= 5:
            result("step", step, f"{optimizer.get_lr():.9f}", parameters_of(net))
    state = optimizer.state_dict()
    kept = [value.numpy() for key, value in state.items() if key != "LR_Scheduler"]
    result("state", len(kept), digest(kept), state["LR_Scheduler"]["last_epoch"])


def halves():
    """Two optimizers over two halves of one wrapped model, which step in turn and together."""
    net = start()
    model = paddle.DataParallel(net)
    halves = [net.body.parameters() + net.blocks.parameters(), net.head.parameters()]
    schedule = paddle.optimizer.lr.MultiStepDecay(0.01, [1, 2])
    optimizers = [
        paddle.optimizer.Adam(schedule, parameters=halves[0]),
        paddle.optimizer.Momentum(0.1, parameters=halves[1]),
    ]
    random = np.random.default_rng(dist.get_rank())
    for step in range(6):
        x = paddle.to_tensor(random.random((5, 6), np.float32))
        nn.functional.cross_entropy(model(x), paddle.to_tensor(random.integers(0, 2, 5))).backward()
        for number, optimizer in enumerate(optimizers):
            if step % 3 in (number, 2):
                optimizer.step()
            optimizer.clear_grad()
        if step % 2:
            schedule.step()  # by epoch, which is two steps
        result("step", step, schedule.last_lr, parameters_of(net))


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    if name == "resume":
        resume(arguments[0], *map(int, arguments[1:3]))
    else:
        {"epochs": epochs, "accumulation": accumulation, "halves": halves}[name]()
