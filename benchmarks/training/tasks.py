"""What a worker of the pool is told to do: one line of JSON each.

Free of numpy, which a worker imports once its process is prepared.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, json

if TYPE_CHECKING:
    from common.launch.flags import TrainingConfig

__all__ = ["DECODER", "Evaluate", "HandOver", "Serve", "Task", "TorchTrain", "Train", "Training"]


class Training(Struct, frozen=True, kw_only=True):
    """What is trained: the fields of TrainingConfig that a worker needs."""

    model: str
    dataset: str
    data_dir: str | None
    batch_size: int
    steps: int | None
    epochs: int | None
    optimizer: str
    lr: float
    seed: int
    timeout: float
    overlap: bool

    @staticmethod
    def of(config: TrainingConfig) -> Training:
        values = {name: getattr(config, name) for name in Training.__struct_fields__}
        return Training(**{**values, "data_dir": str(config.data_dir) if config.data_dir else None})

    def config(self) -> TrainingConfig:
        from common.launch.flags import TrainingConfig

        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return TrainingConfig(**{**values, "data_dir": Path(self.data_dir) if self.data_dir else None})


class Train(Struct, frozen=True, kw_only=True, tag="rank"):
    """Be one rank of one training.

    Args:
        servers: their addresses.
        watch: how it is slowed and watched, as `Watch.to_json` has it.
        trace: folder for this rank's part of a trace.
        endpoints: of paddle.distributed's ranks, if it is under Paddle.
        keep: file for the parameters before and after.
    """

    training: Training
    rank: int
    nranks: int
    scheme: str
    backend: str
    mode: str
    sharded: bool
    servers: list[str]
    rendezvous: str
    warmup_steps: int
    evaluate: bool
    watch: dict[str, Any] | None
    trace: str | None
    endpoints: list[str]
    keep: str | None


class TorchTrain(Struct, frozen=True, kw_only=True, tag="torch rank"):
    """Be one rank of one training under PyTorch, which begins with what `HandOver` wrote to `file`."""

    training: Training
    rank: int
    nranks: int
    file: str
    rendezvous: str
    warmup_steps: int
    evaluate: bool
    keep: str | None


class Serve(Struct, frozen=True, kw_only=True, tag="server"):
    """Be one parameter server for one training, at a free port of `host`.

    Args:
        shard: its index, of so many.
    """

    host: str
    nranks: int
    shard: tuple[int, int]
    timeout: float
    trace: str | None


class Evaluate(Struct, frozen=True, kw_only=True, tag="evaluate"):
    """Find the accuracy of some of the parameters that were kept in `file`."""

    training: Training
    file: str
    rows: list[int]


class HandOver(Struct, frozen=True, kw_only=True, tag="hand over"):
    """Write to `file` what a process without Paddle needs to train as one with it."""

    training: Training
    nranks: int
    file: str


Task = Train | TorchTrain | Serve | Evaluate | HandOver
DECODER: json.Decoder[Task] = json.Decoder(Task)
