"""Runs a user's own Paddle program as one rank under a scheme, its imports redirected, and notes its steps.

The program stays as it is: `paddle.DataParallel`, `paddle.distributed` and Fleet are given the scheme's functions
before it starts. A step is what lies between the ends of two backwards, which is seen the same way under every scheme.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import GradSyncError
from common.process import die_with_parent, prepare_process
from common.process_memory import pss_bytes

__all__ = ["main", "redirect"]

MEMORY_STEPS = 3  # memory is looked at in the first steps, which are warm-up: reading it takes milliseconds
SNAPSHOTS = (5, 20)  # after so many backwards, or at the end if it comes sooner, the parameters are kept to be compared


class StepClock:
    """Notes when each outermost backward ended, the memory at the end of the third, and some states of the model."""

    def __init__(self, memory: Callable[[], int], models: list[Any]) -> None:
        self.times: list[float] = []
        self.memory_bytes = 0
        self.snapshots: dict[int, dict[str, Any]] = {}
        self._memory, self._models = memory, models

    def before_backward(self) -> None:
        if len(self.times) in SNAPSHOTS:
            self.take_snapshot(len(self.times))

    def after_backward(self) -> None:
        if len(self.times) < MEMORY_STEPS:
            self.memory_bytes = self._memory()
        self.times.append(time.monotonic())

    def take_snapshot(self, steps: int) -> None:
        from common.model_arena import trainable

        if self._models and steps not in self.snapshots:
            self.snapshots[steps] = {name: p.numpy() for name, p in trainable(self._models[0])}


def redirect(scheme: str) -> None:
    """Give Paddle's distributed modules the functions of `ps` or `collective`."""
    import paddle
    from paddle.distributed import fleet

    from common.names import PUBLIC

    module = importlib.import_module(scheme)
    for name in PUBLIC:
        for target in (paddle.distributed, fleet):
            setattr(target, name, getattr(module, name))
    paddle.DataParallel = module.DataParallel


def leave_one_rank_alone() -> None:
    """Fleet of Paddle 3.3 fails on one rank, whose model it takes for a pipeline; as DataParallel does, let it be."""
    from paddle.distributed import fleet

    fleet.distributed_model = lambda model: model


def note_wrapped_models() -> list[Any]:
    """Fills with every model that the program gives to DataParallel, directly or through Fleet."""
    import paddle
    from paddle.distributed import fleet

    found: list[Any] = []

    def noting(wrap: Any) -> Any:
        def wrapped(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not found:
                found.append(model)
            return wrap(model, *args, **kwargs)

        return wrapped

    paddle.DataParallel = noting(paddle.DataParallel)
    fleet.distributed_model = noting(fleet.distributed_model)
    return found


def main() -> int:
    scheme, record, script, *arguments = sys.argv[1:]
    if scheme == "paddle-default":
        die_with_parent()  # and nothing else that Paddle's users don't have
    else:
        prepare_process()
    from common.backward import listen_to_backward
    from common.placement import placement_from

    if not scheme.startswith("paddle"):
        redirect(scheme)
    elif placement_from().nranks == 1:
        leave_one_rank_alone()
    models = note_wrapped_models()
    memory_before = pss_bytes()
    clock = StepClock(pss_bytes, models)
    listen_to_backward(clock)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exc:
        if exc.code:
            raise
    except GradSyncError as exc:
        sys.last_value = exc
        print(f"{script}: {type(exc).__name__}: {exc}", file=sys.stderr)
        return exc.exit_code
    write_record(Path(record), clock, clock.memory_bytes - memory_before, models)
    return 0


def write_record(path: Path, clock: StepClock, memory: int, models: list[Any]) -> None:
    """Times, memory above that after imports, digest of this rank's parameters, and rank 0's snapshots."""
    import numpy as np

    from common.model_arena import digest_of_model
    from common.placement import placement_from

    rank = placement_from().rank
    digest = digest_of_model(models[0]) if models else hashlib.sha256().hexdigest()
    content = {"times": clock.times, "memory_bytes": memory, "parameters_sha256": digest}
    path.with_suffix(f".{rank}.json").write_text(json.dumps(content))
    for steps in SNAPSHOTS if rank == 0 and models else ():
        if steps >= len(clock.times):
            clock.take_snapshot(steps)
        np.savez(path.with_suffix(f".{steps}.npz"), allow_pickle=False, **clock.snapshots[steps])


if __name__ == "__main__":
    sys.exit(main())
