"""What a program may do with a wrapped model and its optimizers between two batches, in random orders, for Paddle's own
groups. Prints for each seed its rank, the seed and its parameters' digest.

any_order.py FIRST LAST: for these seeds.
"""

import hashlib
import random
import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn, optimizer

KINDS = {
    "sgd": lambda p, c: optimizer.SGD(0.125, parameters=p, grad_clip=c),
    "momentum": lambda p, c: optimizer.Momentum(0.05, parameters=p, grad_clip=c, weight_decay=0.01),
    "adam": lambda p, c: optimizer.Adam(0.01, parameters=p, grad_clip=c),
    "adamw": lambda p, c: optimizer.AdamW(0.01, parameters=p, grad_clip=c),
    "lamb": lambda p, c: optimizer.Lamb(0.01, parameters=p, grad_clip=c),
}
CLIPS = [None, None, nn.ClipGradByGlobalNorm(0.5), nn.ClipGradByNorm(0.3), nn.ClipGradByValue(0.1)]


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x, left):
        return (self.left if left else self.right)(nn.functional.relu(self.body(x)))


class Program:
    def __init__(self, seed):
        self.random = random.Random(seed)  # the same on all ranks
        self.data = np.random.default_rng([seed, dist.get_rank()])
        paddle.seed(100 * seed + dist.get_rank())
        self.net = Net()
        self.model = paddle.DataParallel(self.net, find_unused_parameters=True)
        apart = self.random.random() < 0.25
        parts = [self.net.body.parameters(), self.net.left.parameters() + self.net.right.parameters()]
        clip, kind = self.random.choice(CLIPS), KINDS[self.random.choice(list(KINDS))]
        self.optimizers = [kind(p, clip) for p in (parts if apart else [self.net.parameters()])]
        self.amp = self.random.random() < 0.2
        self.left = True

    def loss(self):
        x = paddle.to_tensor(self.data.standard_normal((4, 5)).astype("float32"))
        with paddle.amp.auto_cast(enable=self.amp, level="O1", dtype="bfloat16"):
            return self.model(x, self.left).square().mean()

    def backward(self):
        self.loss().backward()

    def quiet_then_loud(self):
        for _ in range(self.random.randint(1, 2)):
            with self.model.no_sync():
                self.loss().backward()
        self.backward()

    def quiet_forwards(self):
        """That a backward synchronises is decided by its forward."""
        for _ in range(self.random.randint(1, 2)):
            with self.model.no_sync():
                loss = self.loss()
            loss.backward()
        self.backward()

    def idle_forward(self):
        """One without a backward decides for the next one."""
        self.loss()
        self.quiet_then_loud()

    def step(self):
        for each in self.optimizers:
            each.step()

    def clear(self):
        zero = self.random.random() < 0.5
        for each in self.optimizers:
            each.clear_grad(set_to_zero=zero)

    def clear_some(self):
        self.optimizers[0].clear_grad()

    def clear_model(self):
        self.model.clear_gradients()

    def switch(self):
        self.left = not self.left

    def freeze(self):
        """One of the layers at the most, so that there is always something to train."""
        layers = [self.net.body, self.net.left, self.net.right]
        frozen = self.random.choice([None, *layers])
        for layer in layers:
            for p in layer.parameters():
                p.stop_gradient = layer is frozen

    def usual(self):
        self.backward()
        self.step()
        self.clear()

    def run(self):
        kinds = [self.usual, self.backward, self.quiet_then_loud, self.step, self.clear, self.clear_some]
        kinds += [self.clear_model, self.switch, self.freeze, self.quiet_forwards, self.idle_forward]
        self.usual()
        for _ in range(self.random.randint(3, 9)):
            self.random.choice(kinds)()
        self.usual()
        return hashlib.sha256(b"".join(p.numpy().tobytes() for p in self.net.parameters())).hexdigest()


def main(first, last):
    dist.init_parallel_env()
    for seed in range(first, last):
        print(f"RESULT {dist.get_rank()} {seed} {Program(seed).run()}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
