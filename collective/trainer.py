"""`python -m collective.trainer --rank N`: one rank of a ring."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from common.system.process import prepare_process

if TYPE_CHECKING:
    from collective.config import CollectiveTrainerConfig

__all__ = ["main"]


def main(args: list[str] | None = None) -> int:
    prepare_process()
    from collective.config import CollectiveTrainerConfig
    from common.launch.cli import run_command

    return run_command(CollectiveTrainerConfig, run, prog="collective.trainer", args=args)


def run(config: CollectiveTrainerConfig) -> None:
    from collective.group import connect
    from collective.synchronizer import RingSynchronizer
    from common.network.rpc import check_bind_host, host_of
    from common.trainer.entry import run_training

    if not config.rendezvous.startswith("unix"):
        check_bind_host(host_of(config.rendezvous), insecure=config.insecure)
    run_training(
        config,
        lambda: RingSynchronizer(
            connect(
                config.rank,
                config.nranks,
                config.rendezvous,
                config.backend,
                algorithm=config.algorithm,
                checksum=config.checksum,
                device=config.device,
                nccl_binding=config.nccl_binding,
                timeout=config.timeout,
            ),
            overlap=config.overlap,
            shard_optimizer=config.shard_optimizer,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
