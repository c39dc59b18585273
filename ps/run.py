"""`python -m ps.run --trainers 4 --servers 1`: servers and trainers on this host."""

from __future__ import annotations

import sys

from common.cli import run_command
from common.launch import Job, flags_of, paddle_environment, wait_for_file
from ps.config import RunConfig

__all__ = ["main"]


def main(args: list[str] | None = None) -> int:
    return run_command(RunConfig, run, prog="ps.run", args=args)


def run(config: RunConfig) -> None:
    with Job(config.log_dir) as job:
        addresses = start_servers(config, job)
        for rank in range(config.nranks):
            flags = flags_of(config, without=("servers",))
            job.start(
                f"rank {rank}",
                ["-m", "ps.trainer", *flags, "--rank", str(rank), "--servers", ",".join(addresses)],
                log=f"workerlog.{rank}",
                environment=paddle_environment(rank, config.nranks),
                on_terminal=rank == 0,
            )
        job.wait()


def start_servers(config: RunConfig, job: Job) -> list[str]:
    """Each takes a free port and tells which by a file, so that no port can be raced for."""
    files = [job.scratch / f"server-{index}" for index in range(config.servers)]
    for index, file in enumerate(files):
        flags = ["--port", "0", "--shard", f"{index}/{config.servers}", "--address-file", str(file)]
        flags += ["--nranks", str(config.nranks), "--timeout", str(config.timeout)]
        job.start(f"server {index}", ["-m", "ps.server", *flags], log=f"serverlog.{index}")
    return [wait_for_file(file, job, timeout=config.timeout) for file in files]


if __name__ == "__main__":
    sys.exit(main())
