"""`python -m collective.run --nranks 4 [script.py ARGS...]`: all ranks of a ring on this host."""

from __future__ import annotations

import sys

from collective.config import CollectiveRunConfig
from common.cli import run_command, split_script
from common.launch import Job, abstract_address, flags_of, paddle_environment
from common.placement import BACKEND_VARIABLE, OVERLAP_VARIABLE, RENDEZVOUS_VARIABLE, TIMEOUT_VARIABLE

__all__ = ["main"]


def main(args: list[str] | None = None) -> int:
    flags, script = split_script(sys.argv[1:] if args is None else args)
    return run_command(CollectiveRunConfig, lambda config: run(config, script), prog="collective.run", args=flags)


def run(config: CollectiveRunConfig, script: list[str]) -> None:
    config.check_script(script)
    rendezvous = abstract_address("ring")
    with Job(config.log_dir) as job:
        for rank in range(config.nranks):
            trainer = ["-m", "collective.trainer", *flags_of(config), "--rank", str(rank), "--rendezvous", rendezvous]
            job.start(
                f"rank {rank}",
                ["-m", "common.script", *script] if script else trainer,
                log=f"workerlog.{rank}",
                environment={
                    **paddle_environment(rank, config.nranks),
                    RENDEZVOUS_VARIABLE: rendezvous,
                    BACKEND_VARIABLE: config.backend,
                    TIMEOUT_VARIABLE: str(config.timeout),
                    OVERLAP_VARIABLE: str(int(config.overlap)),
                },
                on_terminal=rank == 0,
            )
        job.wait()


if __name__ == "__main__":
    sys.exit(main())
