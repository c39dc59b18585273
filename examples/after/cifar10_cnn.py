"""The CIFAR-10 tutorial's small network under Fleet: Adam, validation after each epoch.

python -m collective.run --nranks 2 cifar10_cnn.py --data cifar-10-python.tar.gz

docs/own-program.md says where the archive comes from.
"""

import argparse
import io
import os
import pickle
import sys
import tarfile

import numpy as np
import paddle
from paddle import nn
import collective as fleet
from paddle.io import DataLoader, DistributedBatchSampler, TensorDataset


class ArraysOnly(pickle.Unpickler):
    """Reads what the archive holds, and refuses whatever else a pickle could do."""

    ALLOWED = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }

    def find_class(self, module, name):
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"the archive asks for {module}.{name}, which is no array: refused")
        return super().find_class(module, name)


def read_archive(path, wanted):
    """Images [n, 3, 32, 32] in 0..1 and labels [n, 1] of the batches whose name begins with `wanted`."""
    images, labels = [], []
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            if member.isfile() and member.name.rpartition("/")[2].startswith(wanted):
                content = archive.extractfile(member).read()
                batch = ArraysOnly(io.BytesIO(content), encoding="bytes").load()
                images.append(np.asarray(batch[b"data"]).reshape(-1, 3, 32, 32))
                labels += list(batch[b"labels"])
    return np.concatenate(images).astype("float32") / 255, np.array(labels, "int64").reshape(-1, 1)


class Cifar10Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2D(3, 32, 3)
        self.conv2 = nn.Conv2D(32, 64, 3)
        self.conv3 = nn.Conv2D(64, 64, 3)
        self.pool = nn.MaxPool2D(2, 2)
        self.linear1 = nn.Linear(1024, 64)
        self.linear2 = nn.Linear(64, 10)

    def forward(self, x):
        relu = nn.functional.relu
        x = self.pool(relu(self.conv1(x)))
        x = self.pool(relu(self.conv2(x)))
        x = relu(self.conv3(x))
        return self.linear2(relu(self.linear1(x.flatten(1))))


def make_loader(arrays, batch_size, shuffle):
    data = TensorDataset([paddle.to_tensor(array) for array in arrays])
    return DataLoader(data, batch_sampler=DistributedBatchSampler(data, batch_size, shuffle=shuffle, drop_last=shuffle))


def validate(model, loader):
    """(accuracy, loss) of this rank's part."""
    model.eval()
    found = []
    with paddle.no_grad():
        for images, labels in loader:
            logits = model(images)
            loss = nn.functional.cross_entropy(logits, labels)
            found.append([float(paddle.metric.accuracy(logits, labels)), float(loss)])
    model.train()
    return np.mean(found, 0)


def train(args):
    fleet.init(is_collective=True)
    paddle.seed(args.seed)
    np.random.seed(args.seed)
    model = fleet.distributed_model(Cifar10Net())
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(learning_rate=0.001, parameters=model.parameters()))
    loader = make_loader(read_archive(args.data, "data_batch"), args.batch_size, shuffle=True)
    validation = make_loader(read_archive(args.data, "test_batch"), args.batch_size, shuffle=False)
    step = 0
    for epoch in range(args.epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            if step % 50 == 0 and fleet.worker_index() == 0:
                print(f"epoch {epoch} step {step} loss {float(loss):.4f}", flush=True)
            step += 1
            if step == args.steps:
                break
        accuracy, loss = validate(model, validation)
        if fleet.worker_index() == 0:
            print(f"epoch {epoch} validation accuracy {accuracy:.4f} loss {loss:.4f}", flush=True)
        if step == args.steps:
            break
    if fleet.worker_index() == 0:
        paddle.save(model.state_dict(), args.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="cifar-10-python.tar.gz", help="docs/own-program.md says where from")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many; 0: never")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="cifar10.pdparams")
    args = parser.parse_args()
    if not os.path.isfile(args.data):
        sys.exit(f"no such file: {args.data}; docs/own-program.md says where it comes from")
    train(args)
