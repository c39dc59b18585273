"""`python -m collective.run --nranks 4`: all ranks of a ring on this host."""

from __future__ import annotations

import sys

from collective.config import CollectiveRunConfig
from common.cli import run_command
from common.launch import Job, abstract_address, flags_of, paddle_environment

__all__ = ["main"]


def main(args: list[str] | None = None) -> int:
    return run_command(CollectiveRunConfig, run, prog="collective.run", args=args)


def run(config: CollectiveRunConfig) -> None:
    rendezvous = abstract_address("ring")
    with Job(config.log_dir) as job:
        for rank in range(config.nranks):
            job.start(
                f"rank {rank}",
                [
                    "-m",
                    "collective.trainer",
                    *flags_of(config),
                    "--rank",
                    str(rank),
                    "--rendezvous",
                    rendezvous,
                ],
                log=f"workerlog.{rank}",
                environment=paddle_environment(rank, config.nranks),
                on_terminal=rank == 0,
            )
        job.wait()


if __name__ == "__main__":
    sys.exit(main())
