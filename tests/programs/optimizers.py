"""A Paddle program that trains with the optimizer of the given name, parameters in the given dtype or in two, tied
weights and a head that is not always used; saves the optimizer's state in mid-run and goes on from it.

Prints one line: rank, digests of its parameters and of the optimizer's state, how many accumulators Paddle keeps."""

import hashlib
import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

L2 = paddle.regularizer.L2Decay(1e-3)
OPTIMIZERS = {
    "sgd": lambda r, p: paddle.optimizer.SGD(r, parameters=p, weight_decay=L2),
    "momentum": lambda r, p: paddle.optimizer.Momentum(r, parameters=p, weight_decay=L2, use_nesterov=True),
    "adagrad": lambda r, p: paddle.optimizer.Adagrad(r, parameters=p, initial_accumulator_value=0.1),
    "rmsprop": lambda r, p: paddle.optimizer.RMSProp(r, parameters=p, momentum=0.5, centered=True),
    "adam": lambda r, p: paddle.optimizer.Adam(r, parameters=p, weight_decay=L2, beta1=0.8),
    "adamw": lambda r, p: paddle.optimizer.AdamW(r, parameters=p, weight_decay=0.02),
    "lamb": lambda r, p: paddle.optimizer.Lamb(r, parameters=p),
    "clip": lambda r, p: paddle.optimizer.SGD(r, parameters=p, grad_clip=nn.ClipGradByNorm(0.5)),
    "groups": lambda r, p: paddle.optimizer.Adam(r, parameters=[{"params": p[:2]}, {"params": p[2:]}]),
    "by hand": lambda r, p: paddle.optimizer.SGD(r, parameters=p),
}


class Net(nn.Layer):
    def __init__(self, dtype):
        super().__init__()
        heads = "float64" if dtype == "mixed" else dtype
        self.body = nn.Linear(7, 13)
        self.again = nn.Linear(13, 7)
        self.tied = self.body  # the same parameters by another name
        self.left, self.right = nn.Linear(13, 3).to(dtype=heads), nn.Linear(13, 3).to(dtype=heads)
        self.heads = heads

    def forward(self, x, left):
        x = self.tied(self.again(nn.functional.tanh(self.body(x)))).astype(self.heads)
        return (self.left if left else self.right)(x)


def digest(arrays):
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()[:20]


def main(name, folder, dtype, unused=""):
    if dtype != "mixed":
        paddle.set_default_dtype(dtype)
    dist.init_parallel_env()
    rank = dist.get_rank()
    paddle.seed(7 + rank)
    if rank == 1:
        nn.Linear(2, 2)  # its parameters are named otherwise than rank 0's
    net = Net(dtype)
    model = paddle.DataParallel(net, find_unused_parameters=True)
    schedule = paddle.optimizer.lr.ExponentialDecay(0.05, 0.9)
    optimizer = OPTIMIZERS[name](schedule, net.parameters())
    random = np.random.default_rng(rank)
    for step in range(9):
        for _ in range(2 if step == 6 else 1):  # two backwards before one step
            loss = (
                model(
                    paddle.to_tensor(random.random((5, 7)), dtype=paddle.get_default_dtype()),
                    not unused or step < 2 or step == 7,
                )
                ** 2
            ).mean()
            loss.backward()
        if name == "by hand":
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        if step % 2 or name == "groups":
            optimizer.step()
        else:
            optimizer.minimize(loss)
        optimizer.clear_grad()
        schedule.step()
        if step == 3 and rank == 0:  # rank 0 alone, as programs save checkpoints
            state = optimizer.state_dict()
            paddle.save([net.state_dict(), state], f"{folder}.{dist.get_world_size()}")
        if step == 4:
            dist.barrier()
            saved = paddle.load(f"{folder}.{dist.get_world_size()}")
            model.set_state_dict(saved[0])
            optimizer.set_state_dict(renamed(saved[1], rank))
    state = optimizer.state_dict()
    kept = [v.numpy() for k, v in state.items() if k != "LR_Scheduler"]
    here = sum(len(by_name) for by_name in optimizer._accumulators.values())
    trained = digest(p.numpy() for p in net.parameters())
    print(f"RESULT {rank} {trained} {digest(kept) if name != 'lamb' else ''} accumulators {here}", flush=True)


def renamed(state, rank):
    """Rank 1 has made one more layer than rank 0 has, so its parameters have higher numbers."""
    found = {}
    for key, value in state.items():
        number = key[len("linear_") :].split(".")[0] if key.startswith("linear_") else None
        found[key if number is None else key.replace(f"linear_{number}.", f"linear_{int(number) + rank}.", 1)] = value
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
