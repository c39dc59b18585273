"""Programs with several models, with parameters that are frozen for a while, and with sparse embeddings, for Paddle's
own groups. Prints for each KIND its rank and its parameters' digest.

several_models.py KIND...
"""

import hashlib
import sys
from itertools import pairwise

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

STEPS = 4


def batch(step, width=6):
    random = np.random.default_rng([dist.get_rank(), step])
    return paddle.to_tensor(random.standard_normal((5, width)).astype("float32"))


def net_of(*widths):
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*[each for layer in layers for each in (layer, nn.LeakyReLU())][:-1])


def trainable(net, yes):
    for p in net.parameters():
        p.stop_gradient = not yes


def gan():
    """Two models with an optimizer each; the discriminator is frozen while the generator trains."""
    generator, critic = net_of(3, 8, 6), net_of(6, 8, 1)
    made, judge = paddle.DataParallel(generator), paddle.DataParallel(critic)
    by_made = paddle.optimizer.Adam(0.01, parameters=made.parameters())
    by_judge = paddle.optimizer.Momentum(0.05, parameters=judge.parameters())
    for step in range(STEPS):
        trainable(critic, True)
        by_judge.clear_grad()
        fake = made(batch(step, 3))
        (judge(fake.detach()) ** 2).mean().backward()
        ((judge(batch(step)) - 1) ** 2).mean().backward()
        by_judge.step()
        trainable(critic, False)
        by_made.clear_grad()
        ((judge(fake) - 1) ** 2).mean().backward()
        by_made.step()
    return [generator, critic]


def distillation():
    """A frozen teacher beside the student, one optimizer over two models, and models that come and go."""
    teacher, student, head = net_of(6, 8, 4), net_of(6, 4), net_of(4, 2)
    trainable(teacher, False)
    mine, other = paddle.DataParallel(student), paddle.DataParallel(head)
    optimizer = paddle.optimizer.SGD(0.1, parameters=[*mine.parameters(), *other.parameters()])
    for step in range(STEPS):
        passing = paddle.DataParallel(net_of(6, 6))
        x = batch(step)
        loss = ((mine(x) - teacher(x)) ** 2).mean() + other(mine(x)).square().mean() + passing(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        del passing, loss
    return [student, head]


def thawed():
    """Half of the model is frozen when it is wrapped, and thawed later; then the other half is frozen."""
    net = net_of(6, 8, 8, 2)
    trainable(net[0], False)
    model = paddle.DataParallel(net)
    optimizer = paddle.optimizer.Adam(0.01, parameters=net.parameters())
    for step in range(2 * STEPS):
        if step == STEPS:
            trainable(net[0], True)
        if step == STEPS + 2:
            trainable(net[2], False)
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return [net]


def stages():
    """An optimizer for each stage of the training, and the first one once more."""
    net = net_of(6, 8, 2)
    model = paddle.DataParallel(net, find_unused_parameters=True)
    first = paddle.optimizer.Adam(0.01, parameters=net.parameters())
    for step in range(4 * STEPS):
        if step == STEPS:
            optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
        elif step % (2 * STEPS) == 0:
            optimizer = first
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return [net]


class Words(nn.Layer):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 6, sparse=True)
        self.extra = nn.Embedding(7, 6, sparse=True)
        self.last = nn.Linear(6, 2)

    def forward(self, words, extra):
        found = self.table(words).sum(1)
        return self.last(found if extra is None else found + self.extra(extra))


def sparse(kind=paddle.optimizer.Adam, **settings):
    """Tables whose gradients are rows; some words come twice, and ranks read unequally many."""
    net = Words()
    model = paddle.DataParallel(net, find_unused_parameters=True)
    optimizer = kind(0.01, parameters=model.parameters(), **settings)
    for step in range(STEPS):
        random = np.random.default_rng([dist.get_rank(), step])
        words = paddle.to_tensor(random.integers(0, 20, (4 + dist.get_rank(), 3)))
        extra = paddle.to_tensor(random.integers(0, 7, len(words)))
        model(words, extra).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return [net]


def only_a_table():
    net = nn.Embedding(12, 3, sparse=True)
    model = paddle.DataParallel(net)
    optimizer = paddle.optimizer.SGD(0.5, parameters=model.parameters())
    for step in range(STEPS):
        words = np.random.default_rng([dist.get_rank(), step]).integers(0, 12, 5)
        model(paddle.to_tensor(words)).square().sum().backward()
        optimizer.step()
        optimizer.clear_grad()
    return [net]


KINDS = {each.__name__: each for each in (gan, distillation, stages, thawed, sparse, only_a_table)}


def main(*kinds):
    dist.init_parallel_env()
    for kind in kinds:
        paddle.seed(7 + dist.get_rank())  # rank 0's parameters must win
        nets = KINDS[kind]()
        trained = b"".join(p.numpy().tobytes() for net in nets for p in net.parameters())
        print(f"RESULT {dist.get_rank()} {kind} {hashlib.sha256(trained).hexdigest()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
