"""`python -m ps.trainer --rank N`: one trainer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from common.system.process import prepare_process

if TYPE_CHECKING:
    from ps.command_flags import TrainerConfig

__all__ = ["main"]


def main(args: list[str] | None = None) -> int:
    prepare_process()
    from common.launch.cli import run_command
    from ps.command_flags import TrainerConfig

    return run_command(TrainerConfig, run, prog="ps.trainer", args=args)


def run(config: TrainerConfig) -> None:
    from functools import partial

    from common.launch.outsiders import check_rank_aloud
    from common.system.addresses import parse_addresses
    from common.trainer.entry import run_training
    from ps.client.client import Client
    from ps.client.joining import introduce_outsider
    from ps.synchronizer import ServerSynchronizer, synchronizer_for

    servers = parse_addresses(config.servers)
    check_rank_aloud(config.rank, config.nranks, partial(introduce_outsider, servers, config.rank, config.nranks))

    def connect(servers: str) -> Client:
        return Client(
            parse_addresses(servers),
            config.rank,
            config.nranks,
            timeout=config.timeout,
            data_plane=config.data_plane,
            mode=config.consistency,
        )

    def join(place: str) -> ServerSynchronizer:
        return synchronizer_for(connect(place or config.servers), overlap=config.overlap, connect=connect)

    run_training(config, config.rank, join)


if __name__ == "__main__":
    sys.exit(main())
