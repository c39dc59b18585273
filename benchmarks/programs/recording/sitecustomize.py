"""Notes from within a rank what a program trains and prints, whoever has launched it; the program does not know.

Python imports this module at its start. It imports nothing of ours, for a program may have packages of the same names.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path
from typing import Any

__all__: list[str] = []

FOLDER = os.environ.get("PROGRAMS_RECORD", "")
SEED, BATCHES = (int(os.environ.get(f"PROGRAMS_{name}") or 0) for name in ("SEED", "BATCHES"))
SAME = os.environ.get("PROGRAMS_SAME_SEED", "")  # for ranks that learn only later which they are
OPTIMIZER, LOADER, SAMPLER = "paddle.optimizer.optimizer", "paddle.io.reader", "paddle.io.dataloader.batch_sampler"

began, process = time.time_ns(), os.getpid()
optimizers: list[Any] = []
printed: list[str] = []


class AfterImport:
    """Has something done to a module of Paddle's right after it is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        change = {OPTIMIZER: note_optimizers, LOADER: shorten_streams, SAMPLER: shorten}.get(name)
        spec = PathFinder.find_spec(name, path, target) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def then_change(module: Any) -> None:
            execute(module)
            change(module)

        loader.exec_module = then_change
        return spec


def note_optimizers(module: Any) -> None:
    """Every optimizer that is made: its parameters are trained. Seeds are set here, for Paddle is about to be used."""

    def create(kind: Any, *_: Any, **__: Any) -> Any:  # not __init__, which AdamW does without
        optimizers.append(object.__new__(kind))
        return optimizers[-1]

    module.Optimizer.__new__ = create
    import numpy as np
    from paddle.base import core

    rank = 0 if SAME else int(os.environ.get("PADDLE_TRAINER_ID") or 0)
    seed = SEED + rank  # another on each rank: rank 0's parameters must win
    core.default_cpu_generator().manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def shorten(module: Any) -> None:
    """An epoch ends after the first batches. Samplers end it, so that a loader's own processes end as they do."""
    if not BATCHES:
        return
    for kind in (module.BatchSampler, module.DistributedBatchSampler):
        kind.__iter__ = first_of(kind.__iter__)
        kind.__len__ = at_most(kind.__len__)


def shorten_streams(module: Any) -> None:
    """The same for data sets that have no samplers."""
    if not BATCHES:
        return
    kind = module.DataLoader
    whole, begun = kind.__iter__, first_of(kind.__iter__)
    kind.__iter__ = lambda self: (begun if isinstance(self.dataset, module.IterableDataset) else whole)(self)


def first_of(iterate: Any) -> Any:
    return lambda self: islice(iterate(self), BATCHES)


def at_most(count: Any) -> Any:
    return lambda self: min(count(self), BATCHES)


def trained() -> list[Any]:
    """The parameters of every optimizer, each once, in the order in which they were given."""
    found: dict[int, Any] = {}
    for optimizer in optimizers:
        for given in getattr(optimizer, "_parameter_list", None) or []:
            for parameter in given["params"] if isinstance(given, dict) else [given]:
                found[id(parameter)] = parameter
    return list(found.values())


def write() -> None:
    """At the end of the program, before anything is closed: threads are waited for first."""
    rank = os.environ.get("PADDLE_TRAINER_ID")
    if rank is None or os.getpid() != process or os.environ.get("TRAINING_ROLE") == "PSERVER":
        return  # a launcher, a worker of a DataLoader, a server
    import numpy as np

    path = Path(FOLDER, f"{rank}-{began}-{process}")
    path.with_suffix(".txt").write_text("".join(printed), encoding="utf-8", errors="replace")
    np.savez(path.with_suffix(".npz"), *(parameter.numpy() for parameter in trained()))


class Printed:
    """Standard output, whose text is kept."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> Any:
        printed.append(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


if FOLDER:
    sys.stdout = Printed(sys.stdout)
    sys.meta_path.insert(0, AfterImport())
    threading._register_atexit(write)  # type: ignore[attr-defined]
