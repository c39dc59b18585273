"""The built-in training under Paddle's own DataParallel over Gloo: the same model, data and optimizer."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from common.launch.flags import TrainingConfig

if TYPE_CHECKING:
    from common.trainer.data import Dataset

__all__ = ["PaddleGroup", "train_with_paddle"]


class PaddleGroup:
    """paddle.distributed as far as a run record needs it; joined once, for the rest of this process."""

    scheme, backend, servers, mode, staleness = "paddle", "gloo", 0, "sync", 0

    def __init__(self, rank: int, nranks: int, endpoints: list[str]) -> None:
        import paddle.distributed as dist

        self.rank, self.nranks, self._dist = rank, nranks, dist
        if nranks > 1 and not dist.is_initialized():
            os.environ.update(
                PADDLE_TRAINER_ID=str(rank),
                PADDLE_TRAINERS_NUM=str(nranks),
                PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
                PADDLE_CURRENT_ENDPOINT=endpoints[rank],
                PADDLE_MASTER=endpoints[0],
                PADDLE_DISTRI_BACKEND="gloo",
            )
            dist.init_parallel_env()

    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Every rank's `values` (equal shape and dtype), stacked in rank order."""
        import paddle

        if self.nranks == 1:
            return values[None]
        gathered: list[Any] = []
        self._dist.all_gather(gathered, paddle.to_tensor(values))
        return np.stack([each.numpy() for each in gathered])


def train_with_paddle(
    config: TrainingConfig, group: Any, data: Dataset, *, warmup_steps: int, evaluate_model: bool
) -> Any:
    """As common.trainer.training.train does it, but that paddle.DataParallel exchanges the gradients, inside backward.

    So what a step blocks for the exchange counts as backward, and `sync` is the optimizer's update alone.
    """
    import paddle
    from paddle.nn import functional

    from common.paddle_api.arena_binding import digest_of_model, trainable
    from common.tensors.flat_optimizer import make_paddle_optimizer
    from common.trainer.data import rank_batches
    from common.trainer.models import make_model
    from common.trainer.timeline import Timeline, make_record
    from common.trainer.training import TrainedModel, evaluate

    steps_per_epoch, batches = rank_batches(
        data.train, batch_size=config.batch_size, rank=group.rank, nranks=group.nranks
    )
    model = make_model(config.model, seed=config.seed)
    parallel = paddle.DataParallel(model) if group.nranks > 1 else model
    optimizer = make_paddle_optimizer(config.make_optimizer(), [p for _, p in trainable(model)])
    total = config.total_steps(steps_per_epoch)
    timeline = Timeline()
    for _ in range(total):
        timeline.begin.append(time.monotonic())
        images, labels = (paddle.to_tensor(part) for part in next(batches))
        timeline.input_done.append(time.monotonic())
        loss = functional.cross_entropy(parallel(images), labels)
        timeline.forward_done.append(time.monotonic())
        loss.backward()
        timeline.ready.append(time.monotonic())
        optimizer.step()
        optimizer.clear_grad()
        timeline.end.append(time.monotonic())
        timeline.loss.append(float(loss))
    accuracy = evaluate(model, data.test, group) if evaluate_model else None
    warmup = min(warmup_steps, total - 1)
    return TrainedModel(model, make_record(config, group, timeline, warmup, accuracy, digest_of_model(model)))
