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
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.system.memory import give_memory_back
from common.system.process import prepare_process

if TYPE_CHECKING:
    from common.launch.config import TrainingConfig
    from common.trainer.data import Dataset

__all__ = ["main"]


def main() -> int:
    prepare_process()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints, prints to the log
    importlib.import_module(sys.argv[1])  # before the first job, so that no job is timed with it

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")

    roles: dict[str, Any] = {
        "rank": take_part,
        "server": partial(serve, answer=answer),
        "evaluate": evaluate_kept,
        "hand over": hand_over,
        "torch rank": take_part_with_torch,
    }
    answer(ready=os.getpid())
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer(done=roles[job["role"]](job))
        except Exception as exc:
            answer(error=[type(exc).__name__, str(exc)])
            if job.get("endpoints"):
                return 1  # Gloo has no deadline: the other ranks hear of it by the end of this one
        give_memory_back()
    return 0


def serve(job: dict[str, Any], answer: Any) -> int:
    """Be one parameter server for one training; returns the number of steps."""
    from ps.coordinator.servicer import ParameterServer

    with ParameterServer(
        f"{job['host']}:0", job["nranks"], shard=tuple(job["shard"]), timeout=job["timeout"]
    ) as server:
        answer(address=server.address)
        server.wait()
        server.trace.leave(Path(job["trace"]) if job["trace"] else None)
        return server.steps


def take_part(job: dict[str, Any]) -> dict[str, Any]:
    """Be one rank of one training; returns its run record."""
    import numpy as np

    from benchmarks.training.paddle_training import PaddleGroup, train_with_paddle
    from benchmarks.training.watched import Watch, Watched
    from common.launch.tracing import tracing
    from common.paddle_api.binding import trainable
    from common.trainer.models import make_model
    from common.trainer.training import train

    config = config_of(job)
    settings = {"warmup_steps": job["warmup_steps"], "evaluate_model": job["evaluate"]}
    if job["scheme"] == "paddle":
        group = PaddleGroup(job["rank"], job["nranks"], job["endpoints"])
        trained = train_with_paddle(config, group, dataset_of(config), **settings)
    else:
        parts = Path(job["trace"]) if job["trace"] else None
        with make_synchronizer(job) as synchronizer, tracing(synchronizer, parts, folder=parts):
            watched = Watched(synchronizer, Watch.from_json(job["watch"])) if job["watch"] else None
            data = dataset_of(config)  # loaded here, so that servers hear of it if it cannot be
            trained = train(config, watched or synchronizer, data=data, **settings)
        if watched:
            watched.save()
    if job["keep"]:
        initial = make_model(config.model, seed=config.seed)
        pairs = zip(trainable(initial), trainable(trained.model), strict=True)
        arrays: Any = {name: np.stack([p.numpy(), q.numpy()]) for (name, p), (_, q) in pairs}
        np.savez(job["keep"], allow_pickle=False, **arrays)
    size = sum(int(np.prod(p.shape)) * p.element_size() for _, p in trainable(trained.model))
    return {**trained.record.to_json(), "parameter_bytes": size}


def hand_over(job: dict[str, Any]) -> str | None:
    """Write to a file (.npz) what a process without Paddle needs to train as one with it: the initial parameters by
    name, and int64 `batches` [nranks, steps, batch], the samples that each rank takes. Returns the data's folder."""
    import numpy as np

    from common.paddle_api.binding import trainable
    from common.trainer.data import data_folder, rank_indices
    from common.trainer.models import make_model

    config, nranks = config_of(job), job["nranks"]
    share = {"batch_size": config.batch_size, "nranks": nranks}
    count = len(dataset_of(config).train)
    steps = config.total_steps(rank_indices(count, rank=0, **share)[0])
    batches = [list(islice(rank_indices(count, rank=rank, **share)[1], steps)) for rank in range(nranks)]
    named: Any = {name: p.numpy() for name, p in trainable(make_model(config.model, seed=config.seed))}
    np.savez(job["file"], allow_pickle=False, batches=np.array(batches, np.int64), **named)
    folder = data_folder(config.dataset, config.data_dir)
    return str(folder) if folder else None


def take_part_with_torch(job: dict[str, Any]) -> dict[str, Any]:
    """Be one rank of one training under PyTorch; returns its run record."""
    import numpy as np

    from benchmarks.training.torch_training import TorchGroup, train_with_torch

    config = config_of(job)
    with np.load(job["file"], allow_pickle=False) as stored:
        start = {name: stored[name] for name in stored.files}
    batches = start.pop("batches")[job["rank"]]
    settings = {"warmup_steps": job["warmup_steps"], "evaluate_model": job["evaluate"]}
    with TorchGroup(job["rank"], job["nranks"], Path(job["rendezvous"]), config.timeout) as group:
        trained, record = train_with_torch(config, group, start, batches, dataset_of(config), **settings)
    if job["keep"]:
        arrays: Any = {name: np.stack([start[name], array]) for name, array in trained.items()}
        np.savez(job["keep"], allow_pickle=False, **arrays)
    return {**record.to_json(), "parameter_bytes": sum(array.nbytes for array in trained.values())}


def evaluate_kept(job: dict[str, Any]) -> list[float]:
    """The accuracy on the test split, 0..1, of some of the parameters that `Watched.save` has written."""
    import numpy as np

    from common.paddle_api.binding import layout_of, trainable
    from common.sync.local import LocalSynchronizer
    from common.trainer.models import make_model
    from common.trainer.training import evaluate

    config = config_of(job)
    model = make_model(config.model, seed=config.seed)
    slots = layout_of(model).slots
    found = []
    with np.load(job["file"], allow_pickle=False) as stored:
        kept = stored["parameters"]
    for row in job["rows"]:
        for slot, (_, p) in zip(slots, trainable(model), strict=True):
            p.set_value(kept[row, slot.start : slot.stop].reshape(slot.shape))
        found.append(evaluate(model, dataset_of(config).test, LocalSynchronizer()))
    return found


def config_of(job: dict[str, Any]) -> TrainingConfig:
    from common.launch.config import TrainingConfig

    data_dir = job["training"]["data_dir"]
    return TrainingConfig(**{**job["training"], "data_dir": Path(data_dir) if data_dir else None})


def dataset_of(config: TrainingConfig) -> Dataset:
    """It stays in memory for the next job."""
    return load_once(config.dataset, config.data_dir, config.seed if config.dataset == "synthetic" else 1)


@lru_cache(maxsize=1)
def load_once(name: str, data_dir: Path | None, seed: int) -> Dataset:
    from common.trainer.data import load_dataset

    return load_dataset(name, data_dir, seed=seed)


def make_synchronizer(job: dict[str, Any]) -> Any:
    scheme, timeout = job["scheme"], job["training"]["timeout"]
    if scheme == "local":
        from common.sync.local import LocalSynchronizer

        return LocalSynchronizer()
    if scheme == "ps":
        from ps.client.client import Client
        from ps.store.modes import parse_mode
        from ps.synchronizer import synchronizer_for

        where, mode = (job["servers"], job["rank"], job["nranks"]), parse_mode(job["mode"])
        client = Client(*where, timeout=timeout, data_plane=job["backend"], mode=mode)
        return synchronizer_for(client, overlap=job["training"]["overlap"])
    from collective.group import connect
    from collective.synchronizer import RingSynchronizer

    group = connect(job["rank"], job["nranks"], job["rendezvous"], job["backend"], device="cpu", timeout=timeout)
    return RingSynchronizer(group, overlap=job["training"]["overlap"], shard_optimizer=job["sharded"])


if __name__ == "__main__":
    sys.exit(main())
