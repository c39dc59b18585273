"""A program with all that a training may have: BatchNorm, dropout, random transforms in workers, a schedule, a scaler.

    resumed.py FOLDER WORKERS EPOCHS [STEP]

Killed in the step after STEP, when the commit before is whole; otherwise each rank says the digest of everything.
"""

import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.io import DataLoader, Dataset, DistributedBatchSampler

from common.commit.folder import CommitFolder

if os.environ.get("RESUMED_SCHEME") == "ps":
    from ps import TrainingState
else:
    from collective import TrainingState

EVERY = 3  # steps
folder, workers, epochs, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int([*sys.argv, "-1"][4])


class Noisy(Dataset):
    def __getitem__(self, index):
        image = np.random.RandomState(index).rand(1, 8, 8) + 0.1 * np.random.rand(1, 8, 8) * random.random()
        return image.astype("float32"), np.int64(index % 10)

    def __len__(self):
        return 48


class Residual(nn.Layer):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2D(1, 4, 3, padding=1), nn.BatchNorm2D(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2D(4, 4, 3, padding=1), nn.BatchNorm2D(4))
        self.last = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10))

    def forward(self, images):
        images = self.first(images)
        return self.last(nn.functional.relu(images + self.second(images)))


def digest(*states):
    found = hashlib.sha256()
    for state in states:
        for name, value in sorted(state.items()):
            found.update(f"{name} {value.numpy().tobytes() if hasattr(value, 'numpy') else value}".encode())
    return found.hexdigest()


dist.init_parallel_env()
paddle.seed(3)
np.random.seed(4 + dist.get_rank())
random.seed(5)
model = paddle.DataParallel(Residual())
schedule = paddle.optimizer.lr.StepDecay(0.05, 3)
clip = nn.ClipGradByGlobalNorm(0.5) if os.environ.get("RESUMED_CLIPS") else None
optimizer = paddle.optimizer.Momentum(schedule, parameters=model.parameters(), weight_decay=1e-4, grad_clip=clip)
scaler = paddle.amp.GradScaler(init_loss_scaling=1024, incr_every_n_steps=4)
data = Noisy()
loader = DataLoader(data, batch_sampler=DistributedBatchSampler(data, 4, shuffle=True), num_workers=workers)
state = TrainingState(model=model, optimizer=optimizer, scaler=scaler, checkpoint_dir=folder, commit_every=EVERY)
other = paddle.DataParallel(nn.Linear(2, 2)) if os.environ.get("RESUMED_OTHER") else None
busy = [int(each) for each in os.environ.get("RESUMED_BUSY", "").split()]  # rank, after which step, for how long
for _, (images, labels) in state.steps(loader, epochs=epochs):
    images = images + 0.01 * paddle.randn(images.shape)
    scaler.scale(nn.functional.cross_entropy(model(images), labels)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.clear_grad()
    schedule.step()
    if busy[:2] == [dist.get_rank(), state.step]:
        time.sleep(busy.pop())
        busy.clear()
    if state.step == last:
        while last // EVERY * EVERY not in CommitFolder(Path(folder)).steps():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
print("RESULT", dist.get_rank(), state.step, digest(model.state_dict(), optimizer.state_dict()), file=sys.stderr)
