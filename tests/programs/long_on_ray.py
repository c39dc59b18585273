"""Trains so many steps, or until it is killed; says who its ranks are: `long_on_ray.py FOLDER [STEPS]`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import paddle
import paddle.distributed as dist


def main() -> None:
    dist.init_parallel_env()
    model = paddle.DataParallel(paddle.nn.Linear(4, 3))
    optimizer = paddle.optimizer.SGD(0.01, parameters=model.parameters())
    folder = Path(sys.argv[1])
    for step in range(int((sys.argv[2:] or ["10000"])[0])):
        model(paddle.ones([1, 4])).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        if step == 2:
            draft = folder / f"{dist.get_rank()}.draft"
            draft.write_text(str(os.getpid()))
            draft.rename(folder / str(dist.get_rank()))
        time.sleep(0.02)


if __name__ == "__main__":
    main()
