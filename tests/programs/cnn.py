"""MNIST's network on the digits, as a user's program trains it; prints the parameters' digest: `cnn.py [STEPS]`."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable


def train(steps: int, after_step: Callable[[int, float], object] = lambda step, loss: None) -> str:
    """The digest of this rank's parameters after so many steps; the same on all."""
    import paddle
    import paddle.distributed as dist

    from common.trainer.data import load_dataset
    from common.trainer.models import make_model

    dist.init_parallel_env()
    digits = load_dataset("digits").train
    data = paddle.io.TensorDataset([paddle.to_tensor(digits.images), paddle.to_tensor(digits.labels)])
    sampler = paddle.io.DistributedBatchSampler(data, batch_size=16, shuffle=True)
    batches = iter(paddle.io.DataLoader(data, batch_sampler=sampler))
    model = paddle.DataParallel(make_model("mnist-cnn", seed=7))
    optimizer = paddle.optimizer.Adam(0.001, parameters=model.parameters())
    for step in range(steps):
        images, labels = next(batches)
        loss = paddle.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        after_step(step, float(loss))
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in model.parameters())).hexdigest()


if __name__ == "__main__":
    print("digest", train(int((sys.argv[1:] or ["5"])[0])), flush=True)
