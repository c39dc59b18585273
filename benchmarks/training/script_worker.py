"""Runs a user's own Paddle program as one rank under a scheme, its imports redirected, and notes its steps.

The program stays as it is: `paddle.DataParallel`, `paddle.distributed` and Fleet are given the scheme's functions
before it starts. A step is what lies between the ends of two backwards, which is seen the same way under every scheme.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import GradSyncError
from common.program.script import origin_of, run_script
from common.system.process import die_with_parent, prepare_process
from common.system.process_memory import pss_bytes

__all__ = ["main"]

MEMORY_STEPS = 3  # memory is looked at in the first steps, which are warm-up: reading it takes milliseconds
SNAPSHOTS = (1, 5, 20)  # after so many backwards, or at the end if it comes sooner, rank 0 writes the parameters down


class StepClock:
    """Notes when each outermost backward ended and the memory at the end of the third, and has some states kept.

    Args:
        keep: told after how many backwards the model is in the state that it is in now.
    """

    def __init__(self, memory: Callable[[], int], keep: Callable[[int], None]) -> None:
        self.times: list[float] = []
        self.memory_bytes = 0
        self._memory, self._keep = memory, keep

    def before_backward(self) -> None:
        if len(self.times) in SNAPSHOTS:
            self._keep(len(self.times))

    def after_backward(self) -> None:
        if len(self.times) < MEMORY_STEPS:
            self.memory_bytes = self._memory()
        self.times.append(time.monotonic())

    def end(self) -> None:
        for steps in SNAPSHOTS:
            if steps >= len(self.times):
                self._keep(steps)


def leave_one_rank_alone() -> None:
    """Fleet of Paddle 3.3 fails on one rank, whose model it takes for a pipeline; as DataParallel does, let it be."""
    from paddle.distributed import fleet

    fleet.distributed_model = lambda model: model


def make_one_group_of_all_ranks(nranks: int) -> None:
    """Fleet of Paddle 3.3 makes a second group of all ranks, whose Gloo finds the addresses that the first one left in
    the store and connects to them before the new ones are there: with four ranks it fails or hangs as often as not. It
    is given the first group instead."""
    from paddle.base import core

    gloo: Any = core.ProcessGroupGloo
    create = gloo.create
    of_all: list[Any] = []

    def create_once(store: Any, rank: int, size: int, *rest: Any) -> Any:
        if size != nranks:
            return create(store, rank, size, *rest)
        if not of_all:
            of_all.append(create(store, rank, size, *rest))
        return of_all[0]

    gloo.create = create_once


def leave_before_paddles_end() -> Callable[[], None]:
    """Have this process leave when Python's own exit handlers have run, if it ended well; return what says that it did.

    For Paddle 3.3 with Gloo: in 5 of 630 jobs of two ranks that had trained and told their results, the end of the C
    libraries, which comes after that, was a segmentation fault (why is not known), and Paddle's launcher called it an
    error.
    """
    ended_well = threading.Event()

    def leave() -> None:
        if ended_well.is_set():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    atexit.register(leave)  # before Paddle's and the program's, so that it runs after them
    return ended_well.set


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
    say_that_it_ended_well = leave_before_paddles_end() if scheme.startswith("paddle") else None
    if scheme == "paddle-default":
        die_with_parent()  # and nothing else that Paddle's users don't have
    else:
        prepare_process(of_user=True)
    from common.launch.settings import placement_from
    from common.paddle_api.backward import listen_to_backward
    from common.program.install import install

    if not scheme.startswith("paddle"):
        scheme, _, module = scheme.rpartition("=")
        install(scheme or module, module if scheme else "")
    elif (nranks := placement_from().nranks) == 1:
        leave_one_rank_alone()
    else:
        make_one_group_of_all_ranks(nranks)
    models = note_wrapped_models()
    memory_before = pss_bytes()
    clock = StepClock(pss_bytes, lambda steps: write_snapshot(Path(record), steps, models))
    listen_to_backward(clock)
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        run_script([script, *arguments])
    except SystemExit as exc:
        if isinstance(exc.code, str) and exc.code:  # named, so that it is known as the reason
            print(f"SystemExit: {exc.code}", file=sys.stderr)
            return 1
        if exc.code:
            raise
    except GradSyncError as exc:
        sys.last_value = exc
        print(f"{origin_of(exc) or script}: {type(exc).__name__}: {exc}", file=sys.stderr)
        return exc.exit_code
    clock.end()
    write_record(Path(record), clock, clock.memory_bytes - memory_before, models)
    if say_that_it_ended_well:
        say_that_it_ended_well()
    return 0


def write_record(path: Path, clock: StepClock, memory: int, models: list[Any]) -> None:
    """Times, memory above that after imports, and digest of this rank's parameters."""
    from common.launch.settings import placement_from
    from common.paddle_api.arena_binding import digest_of_model

    rank = placement_from().rank
    digest = digest_of_model(models[0]) if models else hashlib.sha256().hexdigest()
    content = {"times": clock.times, "memory_bytes": memory, "parameters_sha256": digest, "models": len(models)}
    path.with_suffix(f".{rank}.json").write_text(json.dumps(content))


def write_snapshot(path: Path, steps: int, models: list[Any]) -> None:
    """Rank 0's parameters, one after the other, for all at once would show in the memory that is measured."""
    import numpy as np

    from common.launch.settings import placement_from
    from common.paddle_api.arena_binding import trainable

    if not models or placement_from().rank:
        return
    with zipfile.ZipFile(path.with_suffix(f".{steps}.npz"), "w") as archive:
        for name, p in trainable(models[0]):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, p.numpy(), allow_pickle=False)


if __name__ == "__main__":
    sys.exit(main())
