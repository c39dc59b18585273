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
from pathlib import Path
from typing import Any

from common.errors import GradSyncError
from common.process import prepare_process

__all__ = ["main", "redirect"]


class StepClock:
    """Notes when each outermost backward ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def before_backward(self) -> None:
        pass

    def after_backward(self) -> None:
        self.times.append(time.monotonic())


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
    prepare_process()
    from common.backward import listen_to_backward

    if scheme != "paddle":
        redirect(scheme)
    models = note_wrapped_models()
    clock = StepClock()
    listen_to_backward(clock)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except GradSyncError as exc:
        sys.last_value = exc
        print(f"{script}: {type(exc).__name__}: {exc}", file=sys.stderr)
        return exc.exit_code
    write_record(Path(record), clock.times, models)
    return 0


def write_record(path: Path, times: list[float], models: list[Any]) -> None:
    """Times and parameters of this rank; rank 0's are kept whole, to be compared."""
    import numpy as np

    from common.model_arena import digest_of_model, trainable
    from common.placement import placement_from

    rank = placement_from().rank
    digest = digest_of_model(models[0]) if models else hashlib.sha256().hexdigest()
    path.with_suffix(f".{rank}.json").write_text(json.dumps({"times": times, "parameters_sha256": digest}))
    if rank == 0 and models:
        arrays: Any = {name: p.numpy() for name, p in trainable(models[0])}
        np.savez(path.with_suffix(".npz"), allow_pickle=False, **arrays)


if __name__ == "__main__":
    sys.exit(main())
