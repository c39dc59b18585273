"""The MNIST tutorial's program: a small CNN on mnist.json.gz, Adam, DataParallel.

python -m collective.run --nranks 2 mnist_cnn.py --data mnist.json.gz

Killed at any moment and started again, it goes on from its last commit, and ends with the same parameters.

The file is JSON in gzip: [train, validation, test], each [images of 784 floats from 0 to 1, labels from 0 to 9].
docs/own-program.md says how to make it.
"""

import argparse
import gzip
import json
import os
import sys

import numpy as np
import paddle
import collective as dist
from paddle import nn
from paddle.io import BatchSampler, DataLoader, Dataset, DistributedBatchSampler


class MnistDataset(Dataset):
    """One part of the tutorial's file: 0 training, 1 validation, 2 test."""

    def __init__(self, path, part):
        with gzip.open(path) as file:
            images, labels = json.load(file)[part]
        self.images = np.array(images, "float32").reshape(-1, 1, 28, 28)
        self.labels = np.array(labels, "int64").reshape(-1, 1)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]

    def __len__(self):
        return len(self.labels)


class MnistNet(nn.Layer):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2D(1, 20, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2D(20, 20, kernel_size=5, padding=2)
        self.pool = nn.MaxPool2D(kernel_size=2, stride=2)
        self.fc = nn.Linear(980, 10)

    def forward(self, x):
        x = self.pool(nn.functional.relu(self.conv1(x)))
        x = self.pool(nn.functional.relu(self.conv2(x)))
        return self.fc(x.flatten(1))


def evaluate(model, loader):
    model.eval()
    accuracy = [float(paddle.metric.accuracy(model(images), labels)) for images, labels in loader]
    model.train()
    return sum(accuracy) / len(accuracy)


def train(args):
    dist.init_parallel_env()
    paddle.seed(args.seed)
    np.random.seed(args.seed)
    model = dist.DataParallel(MnistNet())
    optimizer = paddle.optimizer.Adam(learning_rate=0.01, parameters=model.parameters())
    data = MnistDataset(args.data, 0)
    sampler = DistributedBatchSampler if args.distributed_sampler else BatchSampler
    loader = DataLoader(data, batch_sampler=sampler(data, batch_size=100, shuffle=True, drop_last=True), num_workers=2)
    state = dist.TrainingState(
        model=model, optimizer=optimizer, checkpoint_dir=args.commits, commit_every=args.commit_every
    )
    for epoch, (images, labels) in state.steps(loader, epochs=args.epochs):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        if state.step % 100 == 0 and dist.get_rank() == 0:
            print(f"epoch {epoch} step {state.step} loss {float(loss):.4f}", flush=True)
    if dist.get_rank() == 0:
        test = DataLoader(MnistDataset(args.data, 2), batch_size=100)
        print(f"test accuracy {evaluate(model, test):.4f}", flush=True)
        paddle.save(model.state_dict(), args.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="mnist.json.gz", help="docs/own-program.md says how to make it")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--commits", default="mnist-commits", help="folder of the commits")
    parser.add_argument("--commit-every", type=int, default=100, help="steps between two commits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--distributed-sampler", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--save", default="mnist.pdparams")
    args = parser.parse_args()
    if not os.path.isfile(args.data):
        sys.exit(f"no such file: {args.data}; docs/own-program.md says how to make it")
    train(args)
