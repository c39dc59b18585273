"""A program of Paddle's alone: four ranks, of which two and two average one model, and all of them another one.
Prints for each rank the digests of their parameters."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn


class Net(nn.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 33), nn.Linear(33, 3)

    def forward(self, x: Any) -> Any:
        return self.last(nn.functional.relu(self.first(x)))


def digest(model: Any) -> str:
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in model.parameters())).hexdigest()


def main() -> None:
    dist.init_parallel_env()
    rank = dist.get_rank()
    low = dist.new_group([0, 1])
    dist.barrier()  # Gloo may fail where two groups are made at once
    high = dist.new_group([2, 3])
    dist.barrier()
    paddle.seed(rank)  # all begin with rank 0's parameters
    some, everyone = paddle.DataParallel(Net(), group=low if rank < 2 else high), paddle.DataParallel(Net())
    adam = paddle.optimizer.Adam(0.01, parameters=some.parameters())
    sgd = paddle.optimizer.SGD(0.01, parameters=everyone.parameters())
    begun = digest(some)
    for step in range(4):
        x = paddle.to_tensor(np.random.default_rng([rank, step]).random((5, 7), np.float32))
        loss = some(x).square().mean()
        if step % 2:  # one backward may reach both
            loss += everyone(x).square().mean()
        loss.backward()
        adam.step()
        sgd.step()
        adam.clear_grad()
        sgd.clear_grad()
    print(f"RESULT {rank} {begun} {digest(some)}", flush=True)


main()
