"""The Fleet tutorial's program: ResNet-18 for 28x28 images on Fashion-MNIST, Momentum with L2 decay.

python -m collective.run --nranks 2 fashion_resnet18.py --data-dir DIR

Killed at any moment and started again, it goes on from its last commit, and ends with the same parameters.

DIR holds the four IDX .gz files of Fashion-MNIST; docs/own-program.md says where they come from.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import paddle
from paddle import nn
import collective as fleet
from paddle.io import DataLoader, DistributedBatchSampler
from paddle.vision.datasets import FashionMNIST
from paddle.vision.models import resnet18


def make_model():
    """ResNet-18 (64-128-256-512) with a 3x3 stem and no max-pool: 28x28 images are small enough already."""
    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2D(1, 64, 3, padding=1, bias_attr=False)
    model.maxpool = nn.Identity()
    return model


def make_loader(folder, mode, batch_size):
    prefix = {"train": "train", "test": "t10k"}[mode]
    data = FashionMNIST(
        image_path=str(Path(folder) / f"{prefix}-images-idx3-ubyte.gz"),
        label_path=str(Path(folder) / f"{prefix}-labels-idx1-ubyte.gz"),
        mode=mode,
        transform=lambda image: np.asarray(image, "float32").reshape(1, 28, 28) / 255,
    )
    sampler = DistributedBatchSampler(data, batch_size=batch_size, shuffle=mode == "train", drop_last=True)
    return DataLoader(data, batch_sampler=sampler)


def evaluate(model, loader, steps):
    """Top-1 and top-5 accuracy of this rank's part of the test set."""
    model.eval()
    found = []
    for i, (images, labels) in enumerate(loader):
        logits = model(images)
        found.append([float(paddle.metric.accuracy(logits, labels, k=k)) for k in (1, 5)])
        if i + 1 == steps:
            break
    model.train()
    return np.mean(found, 0)


def train(args):
    fleet.init(is_collective=True)
    paddle.seed(args.seed)
    np.random.seed(args.seed)
    model = fleet.distributed_model(make_model())
    optimizer = paddle.optimizer.Momentum(
        learning_rate=args.lr * fleet.worker_num(),
        momentum=0.9,
        weight_decay=paddle.regularizer.L2Decay(1e-4),
        parameters=model.parameters(),
    )
    optimizer = fleet.distributed_optimizer(optimizer)
    state = fleet.TrainingState(
        model=model, optimizer=optimizer, checkpoint_dir=args.commits, commit_every=args.commit_every
    )
    loader = make_loader(args.data_dir, "train", args.batch_size)
    for epoch, (images, labels) in state.steps(loader, epochs=args.epochs):
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        if state.step % args.log_every == 0 and fleet.worker_index() == 0:
            top1, top5 = (float(paddle.metric.accuracy(logits, labels, k=k)) for k in (1, 5))
            print(f"epoch {epoch} step {state.step} loss {float(loss):.4f} top1 {top1:.3f} top5 {top5:.3f}", flush=True)
    if args.test_steps:
        top1, top5 = evaluate(model, make_loader(args.data_dir, "test", args.batch_size), args.test_steps)
        if fleet.worker_index() == 0:
            print(f"test top1 {top1:.4f} top5 {top5:.4f}", flush=True)
    if fleet.worker_index() == 0:
        paddle.save(model.state_dict(), args.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", default="fashion-mnist", help="docs/own-program.md says where from")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--commits", default="resnet18-commits", help="folder of the commits")
    parser.add_argument("--commit-every", type=int, default=100, help="steps between two commits")
    parser.add_argument("--test-steps", type=int, default=10, help="batches of the test set; 0: no test")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01, help="for one worker; multiplied by their number")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="resnet18.pdparams")
    args = parser.parse_args()
    if not Path(args.data_dir).is_dir():
        sys.exit(f"no such folder: {args.data_dir}; docs/own-program.md says where it comes from")
    train(args)
