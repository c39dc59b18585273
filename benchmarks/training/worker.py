"""`python -m benchmarks.training.worker paddle|torch`: takes one job after the other, so that the library is imported
once.

A job is a line of JSON on stdin; so are its answers on stdout: a server's address once it listens, and at the end
{"done": result} or {"error": [kind, message]}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.training.tasks import DECODER, Evaluate, HandOver, Serve, Task, TorchTrain, Train
from common.system.memory import give_memory_back
from common.system.process import prepare_process

if TYPE_CHECKING:
    from common.launch.flags import TrainingConfig
    from common.trainer.data import Dataset

__all__ = ["main"]


def main() -> int:
    prepare_process()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints, prints to the log
    importlib.import_module(sys.argv[1])  # before the first job, so that no job is timed with it

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")

    answer(ready=os.getpid())
    for line in sys.stdin:
        task = DECODER.decode(line)
        try:
            answer(done=done(task, answer))
        except Exception as exc:
            answer(error=[type(exc).__name__, str(exc)])
            if isinstance(task, Train) and task.endpoints:
                return 1  # Gloo has no deadline: the other ranks hear of it by the end of this one
        give_memory_back()
    return 0


def done(task: Task, answer: Any) -> Any:
    """The result of a task."""
    match task:
        case Train():
            return take_part(task)
        case TorchTrain():
            return take_part_with_torch(task)
        case Serve():
            return serve(task, answer)
        case Evaluate():
            return evaluate_kept(task)
        case HandOver():
            return hand_over(task)


def serve(task: Serve, answer: Any) -> int:
    """Be one parameter server for one training; returns the number of steps."""
    from ps.coordinator.servicer import ParameterServer

    with ParameterServer(f"{task.host}:0", task.nranks, shard=task.shard, timeout=task.timeout) as server:
        answer(address=server.address)
        server.wait()
        server.trace.leave(Path(task.trace) if task.trace else None)
        return server.steps


def take_part(task: Train) -> dict[str, Any]:
    """Be one rank of one training; returns its run record."""
    import numpy as np

    from benchmarks.contestants.paddle_training import PaddleGroup, train_with_paddle
    from benchmarks.training.watched import Watch, Watched
    from common.launch.tracing import tracing
    from common.paddle_api.arena_binding import trainable
    from common.trainer.models import make_model
    from common.trainer.training import train

    config = task.training.config()
    settings: dict[str, Any] = {"warmup_steps": task.warmup_steps, "evaluate_model": task.evaluate}
    if task.scheme == "paddle":
        group = PaddleGroup(task.rank, task.nranks, task.endpoints)
        trained = train_with_paddle(config, group, dataset_of(config), **settings)
    else:
        parts = Path(task.trace) if task.trace else None
        with make_synchronizer(task) as synchronizer, tracing(synchronizer, parts, folder=parts):
            watched = Watched(synchronizer, Watch.from_json(task.watch)) if task.watch else None
            data = dataset_of(config)  # loaded here, so that servers hear of it if it cannot be
            trained = train(config, watched or synchronizer, data=data, **settings)
        if watched:
            watched.save()
    if task.keep:
        initial = make_model(config.model, seed=config.seed)
        pairs = zip(trainable(initial), trainable(trained.model), strict=True)
        arrays: Any = {name: np.stack([p.numpy(), q.numpy()]) for (name, p), (_, q) in pairs}
        np.savez(task.keep, allow_pickle=False, **arrays)
    size = sum(int(np.prod(p.shape)) * p.element_size() for _, p in trainable(trained.model))
    return {**trained.record.to_json(), "parameter_bytes": size}


def hand_over(task: HandOver) -> str | None:
    """Write to a file (.npz) what a process without Paddle needs to train as one with it: the initial parameters by
    name, and int64 `batches` [nranks, steps, batch], the samples that each rank takes. Returns the data's folder."""
    import numpy as np

    from common.paddle_api.arena_binding import trainable
    from common.trainer.data import data_folder, rank_indices
    from common.trainer.models import make_model

    config, nranks = task.training.config(), task.nranks
    share = {"batch_size": config.batch_size, "nranks": nranks}
    count = len(dataset_of(config).train)
    steps = config.total_steps(rank_indices(count, rank=0, **share)[0])
    batches = [list(islice(rank_indices(count, rank=rank, **share)[1], steps)) for rank in range(nranks)]
    named: Any = {name: p.numpy() for name, p in trainable(make_model(config.model, seed=config.seed))}
    np.savez(task.file, allow_pickle=False, batches=np.array(batches, np.int64), **named)
    folder = data_folder(config.dataset, config.data_dir)
    return str(folder) if folder else None


def take_part_with_torch(task: TorchTrain) -> dict[str, Any]:
    """Be one rank of one training under PyTorch; returns its run record."""
    import numpy as np

    from benchmarks.contestants.torch_training import TorchGroup, train_with_torch

    config = task.training.config()
    with np.load(task.file, allow_pickle=False) as stored:
        start = {name: stored[name] for name in stored.files}
    batches = start.pop("batches")[task.rank]
    settings: dict[str, Any] = {"warmup_steps": task.warmup_steps, "evaluate_model": task.evaluate}
    with TorchGroup(task.rank, task.nranks, Path(task.rendezvous), config.timeout) as group:
        trained, record = train_with_torch(config, group, start, batches, dataset_of(config), **settings)
    if task.keep:
        arrays: Any = {name: np.stack([start[name], array]) for name, array in trained.items()}
        np.savez(task.keep, allow_pickle=False, **arrays)
    return {**record.to_json(), "parameter_bytes": sum(array.nbytes for array in trained.values())}


def evaluate_kept(task: Evaluate) -> list[float]:
    """The accuracy on the test split, 0..1, of some of the parameters that `Watched.save` has written."""
    import numpy as np

    from common.paddle_api.arena_binding import layout_of, trainable
    from common.sync.local import LocalSynchronizer
    from common.trainer.models import make_model
    from common.trainer.training import evaluate

    config = task.training.config()
    model = make_model(config.model, seed=config.seed)
    slots = layout_of(model).slots
    found = []
    with np.load(task.file, allow_pickle=False) as stored:
        kept = stored["parameters"]
    for row in task.rows:
        for slot, (_, p) in zip(slots, trainable(model), strict=True):
            p.set_value(kept[row, slot.start : slot.stop].reshape(slot.shape))
        found.append(evaluate(model, dataset_of(config).test, LocalSynchronizer()))
    return found


def dataset_of(config: TrainingConfig) -> Dataset:
    """It stays in memory for the next job."""
    return load_once(config.dataset, config.data_dir, config.seed if config.dataset == "synthetic" else 1)


@lru_cache(maxsize=1)
def load_once(name: str, data_dir: Path | None, seed: int) -> Dataset:
    from common.trainer.data import load_dataset

    return load_dataset(name, data_dir, seed=seed)


def make_synchronizer(task: Train) -> Any:
    scheme, timeout, overlap = task.scheme, task.training.timeout, task.training.overlap
    if scheme == "local":
        from common.sync.local import LocalSynchronizer

        return LocalSynchronizer()
    if scheme == "ps":
        from ps.client.client import Client
        from ps.store.modes import parse_mode
        from ps.synchronizer import synchronizer_for

        where, mode = (task.servers, task.rank, task.nranks), parse_mode(task.mode)
        client = Client(*where, timeout=timeout, data_plane=task.backend, mode=mode)
        return synchronizer_for(client, overlap=overlap)
    from collective.group import connect
    from collective.synchronizer import RingSynchronizer

    group = connect(task.rank, task.nranks, task.rendezvous, task.backend, device="cpu", timeout=timeout)
    return RingSynchronizer(group, overlap=overlap, shard_optimizer=task.sharded)


if __name__ == "__main__":
    sys.exit(main())
