"""The body of every trainer command: train, then report as rank 0."""

from __future__ import annotations

import json
from collections.abc import Callable

from common.launch.cli import check_writable
from common.launch.flags import TrainingConfig
from common.paddle_api.loading import import_paddle
from common.sync.boundaries import join_first
from common.sync.synchronizer import Synchronizer
from common.system.atomic_file import write_file, writing
from common.system.process import note_done
from common.system.sigterm import end_in_order_on_sigterm

__all__ = ["run_training"]


def run_training(config: TrainingConfig, rank: int, make_synchronizer: Callable[[str], Synchronizer]) -> None:
    """Train with the synchronizer that is made, and leave it in good order; rank 0 prints, saves and records.

    Args:
        make_synchronizer: joins the group that meets at that place; "": as the flags say.
    """
    import_paddle()
    import paddle

    from common.launch.tracing import parts_folder, tracing
    from common.trainer.report import TrainingProgress, print_summary
    from common.trainer.training import train

    folder = parts_folder()
    if folder is not None:
        end_in_order_on_sigterm()
    files = {"json": config.json, "save": config.save, "trace": None if folder else config.trace}
    with join_first(make_synchronizer, rank, config.wait_limit) as synchronizer:
        for flag, path in files.items() if synchronizer.rank == 0 else ():
            check_writable(flag, path)
        with (
            tracing(synchronizer, config.trace, folder=folder),
            TrainingProgress(synchronizer.rank) as progress,
        ):
            trained = train(config, synchronizer, on_step=progress)
    if synchronizer.rank != 0:
        note_done()
        return
    if config.json is not None:
        write_file(config.json, json.dumps(trained.record.to_json(), indent=1) + "\n")
    if config.save is not None:
        with writing(config.save) as unfinished:
            paddle.save(trained.model.state_dict(), str(unfinished))
    note_done()
    print_summary(trained.record)  # last: whoever reads it may have gone, as `head` does
