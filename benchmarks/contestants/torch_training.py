"""The built-in training under PyTorch's DistributedDataParallel over Gloo: the same model, data and optimizer.

A process with PyTorch never imports Paddle. Paddle's initial parameters, and which samples each rank takes in each
step, come to it in a file (`worker.hand_over`); its own parameters leave it under Paddle's names, in Paddle's shapes.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import GradSyncError, PeerLost
from common.launch.flags import TrainingConfig
from common.tensors.arena import FloatArray, sha256_of_parameters
from common.tensors.optimizers import Optimizer
from common.trainer.data import Dataset, Split
from common.trainer.record import RunRecord
from common.trainer.timeline import Timeline, make_record

__all__ = ["TorchGroup", "settings_in_torch", "train_with_torch", "why_absent"]

Parameters = dict[str, FloatArray]  # by Paddle's names, in the order of Paddle's state_dict, as Paddle lays them out

EVALUATION_BATCH = 500
CLASSES = {"sgd": "SGD", "momentum": "SGD", "adagrad": "Adagrad", "adam": "Adam", "adamw": "AdamW"}
"""In torch.optim. RMSProp has none: Paddle adds epsilon to the mean square, PyTorch to its root."""
NAMES = {"learning_rate": "lr", "epsilon": "eps", "use_nesterov": "nesterov"}  # of settings, where PyTorch has others


def why_absent(config: TrainingConfig) -> str:
    """Why PyTorch cannot train as `config` says on this machine; "" if it can."""
    if not importlib.util.find_spec("torch"):
        return "PyTorch is not installed (pip install torch)"
    if config.optimizer not in CLASSES:
        return f"PyTorch has no optimizer that computes what Paddle's {config.optimizer} does"
    model = config.model.partition(":")[0]
    return "" if model in MODELS else f"the model {model} has not been rebuilt in PyTorch"


class TorchGroup:
    """torch.distributed as far as a run record needs it; a context manager. One rank alone joins nothing.

    Args:
        meeting: a file that does not exist yet, the same for all ranks.
        timeout: deadline of every wait for another rank, in seconds.

    Raises:
        PeerLost: not all ranks came, within `timeout`.
    """

    scheme, backend, servers, mode, staleness = "torch-ddp", "gloo", 0, "sync", 0

    def __init__(self, rank: int, nranks: int, meeting: Path, timeout: float) -> None:
        import torch.distributed as dist

        self.rank, self.nranks, self._dist = rank, nranks, dist
        self._meeting, self._timeout = meeting, timedelta(seconds=timeout)

    def __enter__(self) -> TorchGroup:
        if self.nranks > 1:
            with self.naming("joining"):
                where = {"init_method": f"file://{self._meeting}", "rank": self.rank, "world_size": self.nranks}
                self._dist.init_process_group("gloo", timeout=self._timeout, **where)
        return self

    def __exit__(self, *_: object) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group()

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """What PyTorch raises within becomes one line that says where it was. The store and Gloo tell only that nobody
        came, or that a connection has ended or was silent: another rank is where to look."""
        try:
            yield
        except RuntimeError as exc:
            said = str(exc).strip().partition("\n")[0]
            where = f"torch-ddp, rank {self.rank} of {self.nranks}, {what}"
            if isinstance(exc, self._dist.DistError) or any(word in said.lower() for word in ("gloo", "time")):
                limit = f"{self._timeout.total_seconds():g} s"
                raise PeerLost(f"{where}: another rank was lost or late (--timeout {limit}): {said}") from exc
            raise GradSyncError(f"{where}: {said}") from exc

    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Every rank's `values` (equal shape and dtype), stacked in rank order."""
        import torch

        if self.nranks == 1:
            return values[None]
        mine = torch.from_numpy(np.ascontiguousarray(values))
        gathered = [torch.empty_like(mine) for _ in range(self.nranks)]
        self._dist.all_gather(gathered, mine)
        return np.stack([each.numpy() for each in gathered])


def train_with_torch(
    config: TrainingConfig,
    group: TorchGroup,
    start: Parameters,
    batches: npt.NDArray[np.int64],
    data: Dataset,
    *,
    warmup_steps: int,
    evaluate_model: bool,
) -> tuple[Parameters, RunRecord]:
    """As common.trainer.training.train does it, but that DistributedDataParallel, as it comes, exchanges the
    gradients, inside backward; so `sync` is the optimizer's update alone.

    Args:
        start: the initial parameters.
        batches: [steps, batch], the samples that this rank takes.

    Raises:
        PeerLost: another rank did not take part within the group's deadline.
    """
    import torch
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    model = model_of(config.model, start)
    with group.naming("before the first step"):
        parallel = DistributedDataParallel(model) if group.nranks > 1 else model
    description = config.make_optimizer()
    make = getattr(torch.optim, CLASSES[description.name])
    optimizer = make(model.parameters(), **settings_in_torch(description))
    timeline = Timeline()
    for step, samples in enumerate(batches):
        with group.naming(f"in step {step:,} of {len(batches):,}"):
            timeline.begin.append(time.monotonic())
            images, labels = (torch.from_numpy(part[samples]) for part in (data.train.images, data.train.labels))
            timeline.input_done.append(time.monotonic())
            loss = functional.cross_entropy(parallel(images), labels)
            timeline.forward_done.append(time.monotonic())
            loss.backward()
            timeline.ready.append(time.monotonic())
            optimizer.step()
            optimizer.zero_grad()
            timeline.end.append(time.monotonic())
            timeline.loss.append(loss.item())
    with group.naming("after the last step"):
        accuracy = evaluate(model, data.test, group) if evaluate_model else None
        trained = {name: turned(p.detach().numpy()) for name, p in model.named_parameters()}
        digest = sha256_of_parameters(trained.items())
        everyone: Any = group  # a Synchronizer as far as a record needs one
        warmup = min(warmup_steps, len(batches) - 1)
        return trained, make_record(config, everyone, timeline, warmup, accuracy, digest)


def evaluate(model: Any, split: Split, group: TorchGroup) -> float:
    """Share of `split` that the model classifies rightly, 0..1; every rank takes its part."""
    import torch

    model.eval()
    right = 0
    mine = np.arange(group.rank, len(split), group.nranks)
    with torch.no_grad():
        for begin in range(0, len(mine), EVALUATION_BATCH):
            part = mine[begin : begin + EVALUATION_BATCH]
            guess = model(torch.from_numpy(split.images[part])).argmax(1).numpy()
            right += int((guess == split.labels[part]).sum())
    return float(group.all_gather(np.array([right], np.int64)).sum()) / len(split)


def model_of(name: str, start: Parameters) -> Any:
    """The torch.nn.Module that computes what `common.trainer.models.make_model(name)` does, holding `start`."""
    import torch

    model = MODELS[name.partition(":")[0]](start)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.from_numpy(turned(start[key])))
    return model


def turned(array: FloatArray) -> FloatArray:
    """From Paddle's layout to PyTorch's and back: a Linear's weight is [inputs, outputs] there, the reverse here."""
    return np.ascontiguousarray(array.T) if array.ndim == 2 else array


def mnist_cnn(start: Parameters) -> Any:  # noqa: ARG001 - has no sizes to be given
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 20, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(20, 20, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Flatten(),
        nn.Linear(980, 10),
    )


def mlp(start: Parameters) -> Any:
    from torch import nn

    layers: list[Any] = [nn.Flatten()]
    for weight in (array for array in start.values() if array.ndim == 2):
        layers += [nn.Linear(*weight.shape), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


MODELS = {"mnist-cnn": mnist_cnn, "mlp": mlp}  # those of common/trainer/models.py, with the same names of parameters


def settings_in_torch(description: Optimizer) -> dict[str, Any]:
    """The keyword arguments that make one of torch.optim from the description of one of Paddle's."""
    settings: Mapping[str, Any] = asdict(description)
    found = {NAMES.get(key, key): value for key, value in settings.items() if not key.startswith("beta")}
    return {**found, "betas": (settings["beta1"], settings["beta2"])} if "beta1" in settings else found
