"""The body of every trainer command: train, then report as rank 0."""

from __future__ import annotations

import json
from collections.abc import Callable

from common.config import TrainingConfig
from common.synchronizer import Synchronizer

__all__ = ["run_training"]


def run_training(config: TrainingConfig, make_synchronizer: Callable[[], Synchronizer]) -> None:
    """Train with the synchronizer that is made, and leave it in good order; rank 0 prints, saves and records."""
    import paddle

    from common.report import TrainingProgress, print_summary
    from common.training import train

    paddle.disable_signal_handler()  # SIGTERM ends a rank; it is no crash to print a C++ traceback for
    with make_synchronizer() as synchronizer, TrainingProgress(synchronizer.rank) as progress:
        trained = train(config, synchronizer, on_step=progress)
    if synchronizer.rank != 0:
        return
    print_summary(trained.record)
    if config.json is not None:
        config.json.parent.mkdir(parents=True, exist_ok=True)
        config.json.write_text(json.dumps(trained.record.to_json(), indent=1) + "\n")
    if config.save is not None:
        paddle.save(trained.model.state_dict(), str(config.save))
