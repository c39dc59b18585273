"""`python -m ps.run --trainers 4 --servers 1 [script.py ARGS...]`: servers and trainers on this host."""

from __future__ import annotations

import sys
from dataclasses import replace

from common.cli import run_command, split_script
from common.launch import Job, flags_of, paddle_environment, start_servers
from common.placement import OVERLAP_VARIABLE, SERVERS_VARIABLE, TIMEOUT_VARIABLE
from ps.config import RunConfig

__all__ = ["main"]


def main(args: list[str] | None = None) -> int:
    flags, script = split_script(sys.argv[1:] if args is None else args)
    return run_command(RunConfig, lambda config: run(config, script), prog="ps.run", args=flags)


def run(config: RunConfig, script: list[str]) -> None:
    config.check_script(script)
    with Job(config.log_dir) as job:
        addresses = start_servers(job, config.servers, nranks=config.nranks, timeout=config.timeout)
        listed = ",".join(addresses)
        flags = flags_of(replace(config, servers=RunConfig.servers))
        for rank in range(config.nranks):
            trainer = ["-m", "ps.trainer", *flags, "--rank", str(rank), "--servers", listed]
            job.start(
                f"rank {rank}",
                ["-m", "common.script", *script] if script else trainer,
                log=f"workerlog.{rank}",
                environment={
                    **paddle_environment(rank, config.nranks),
                    SERVERS_VARIABLE: listed,
                    TIMEOUT_VARIABLE: str(config.timeout),
                    OVERLAP_VARIABLE: str(int(config.overlap)),
                },
                on_terminal=rank == 0,
            )
        job.wait()


if __name__ == "__main__":
    sys.exit(main())
