"""A Paddle program that does what users do: schedulers, clipping, minimize, clear_grad in odd places, no_sync, unused
and frozen parameters, BatchNorm, resuming. Prints one line: its rank and the digest of its parameters."""

import hashlib
import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1D(16), nn.ReLU())
        self.head, self.other = nn.Linear(16, 4), nn.Linear(16, 4)
        self.frozen = nn.Linear(4, 4)
        for p in self.frozen.parameters():
            p.stop_gradient = True

    def forward(self, x, use_other):
        x = self.body(x)
        return self.frozen(self.other(x) if use_other else self.head(x))


def main(unused):
    dist.init_parallel_env()
    rank = dist.get_rank()
    paddle.seed(7 + rank)  # rank 0's parameters must win
    net = Net()
    model = paddle.DataParallel(net, find_unused_parameters=True)
    schedule = paddle.optimizer.lr.StepDecay(0.05, 3)
    optimizer = paddle.optimizer.Adam(
        schedule,
        parameters=model.parameters(),
        weight_decay=paddle.regularizer.L2Decay(1e-3),
        grad_clip=nn.ClipGradByGlobalNorm(1.0),
    )
    random = np.random.default_rng(rank)

    def loss_of():
        x = paddle.to_tensor(random.random((5, 8), np.float32))
        y = paddle.to_tensor(random.integers(0, 4, 5))
        return nn.functional.cross_entropy(model(x, unused and step >= 4), y)

    for step in range(8):
        if step == 5:
            with model.no_sync():
                loss_of().backward()
        loss = loss_of()
        if step % 3 == 0:
            optimizer.clear_grad()
        loss.backward()
        if step % 2:
            optimizer.step()
        else:
            optimizer.minimize(loss)
        if step % 3 != 2:
            optimizer.clear_grad(set_to_zero=False)
        elif step == 2:
            net.clear_gradients()
        if step == 3:
            model.set_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        schedule.step()
    trained = [p.numpy().tobytes() for p in net.parameters() if not p.stop_gradient]
    print(f"RESULT {rank} {hashlib.sha256(b''.join(trained)).hexdigest()}", flush=True)


if __name__ == "__main__":
    main(unused="--unused" in sys.argv)
