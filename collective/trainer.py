"""`python -m collective.trainer --rank N`: one rank of a ring."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from common.system.process import prepare_process

if TYPE_CHECKING:
    from collective.command_flags import CollectiveTrainerConfig

__all__ = ["main"]


def main(args: list[str] | None = None) -> int:
    prepare_process()
    from collective.command_flags import CollectiveTrainerConfig
    from common.launch.cli import run_command

    return run_command(CollectiveTrainerConfig, run, prog="collective.trainer", args=args)


def run(config: CollectiveTrainerConfig) -> None:
    from functools import partial

    from collective.flags import connect_with
    from collective.membership.joining import introduce_outsider
    from collective.synchronizer import RingSynchronizer
    from common.launch.outsiders import check_rank_aloud
    from common.trainer.entry import run_training

    tell = partial(introduce_outsider, config.rendezvous, config.rank, config.nranks)
    check_rank_aloud(config.rank, config.nranks, tell)

    connect = partial(connect_with, config, config.rank, config.nranks)

    def join(place: str) -> RingSynchronizer:
        group = connect(place or config.rendezvous)
        sharded = config.shard_optimizer
        return RingSynchronizer(group, overlap=config.overlap, shard_optimizer=sharded, connect=connect)

    run_training(config, config.rank, join)


if __name__ == "__main__":
    sys.exit(main())
