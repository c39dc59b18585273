"""A Paddle program that reads its gradients in the given way; prints what it has read, and a digest of its parameters.

The ranks' gradients differ, so whoever reads his own in place of the mean is found out."""

import hashlib
import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn


def norm(model):
    return float(sum((p.grad**2).sum() for p in model.parameters()).sqrt())


def main(way):
    dist.init_parallel_env()
    rank = dist.get_rank()
    paddle.seed(7)
    model = paddle.DataParallel(nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)))
    optimizer = paddle.optimizer.Adam(0.05, parameters=model.parameters())
    random = np.random.default_rng(rank)
    read = []
    for step in range(7):
        (model(paddle.to_tensor(random.random((5, 7)), dtype="float32")) ** 2).mean().backward()
        late = step >= 4
        if way == "one rank, from the first step on" and rank == 0:
            read.append(norm(model))
        if way == "all ranks, later" and late:
            read.append(norm(model))
        if way == "clips later" and late:
            read.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3)))
        if way == "clips by value later" and late:
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        if way == "does not bite at first":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if late else 1e3)
        if way == "replaces later" and late:
            for p in model.parameters():
                p.grad = paddle.sign(p.grad)
        if way == "as NumPy, later" and late:
            read.append(float(np.abs(model.parameters()[0].gradient()).sum()))
        optimizer.step()
        if way == "one rank, after the step" and rank == 0:
            read.append(norm(model))
        if way == "zero_grad":
            model.zero_grad()
        else:
            optimizer.clear_grad()
    digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in model.parameters())).hexdigest()[:20]
    print(f"RESULT {rank} {digest} {read}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
