"""`python -m collective.run --nranks 4 [script.py ARGS...]`: a ring's ranks on this host, of one or of several."""

from __future__ import annotations

import sys

from collective.config import CollectiveRunConfig
from common.cli import run_command, split_script
from common.hosts import find_node, start_ranks
from common.launch import Job, abstract_address, flags_of
from common.placement import (
    ALGORITHM_VARIABLE,
    BACKEND_VARIABLE,
    CHECKSUM_VARIABLE,
    INSECURE_VARIABLE,
    OVERLAP_VARIABLE,
    RENDEZVOUS_VARIABLE,
    TIMEOUT_VARIABLE,
)

__all__ = ["main"]


def main(args: list[str] | None = None) -> int:
    flags, script = split_script(sys.argv[1:] if args is None else args)
    return run_command(CollectiveRunConfig, lambda config: run(config, script), prog="collective.run", args=flags)


def run(config: CollectiveRunConfig, script: list[str]) -> None:
    config.check_script(script)
    node = find_node(config.hosts, config.nranks, ports=1, timeout=config.timeout)
    rendezvous = node.meeting_place or abstract_address("ring")
    trainer = ["-m", "collective.trainer", *flags_of(config, without=("hosts", "nranks"))]
    trainer += ["--nranks", str(node.nranks), "--rendezvous", rendezvous, *["--insecure"] * config.hosts.insecure]
    environment = {
        RENDEZVOUS_VARIABLE: rendezvous,
        BACKEND_VARIABLE: config.backend,
        ALGORITHM_VARIABLE: config.algorithm,
        CHECKSUM_VARIABLE: config.checksum,
        TIMEOUT_VARIABLE: str(config.timeout),
        OVERLAP_VARIABLE: str(int(config.overlap)),
        INSECURE_VARIABLE: str(int(config.hosts.insecure)),
    }
    with Job(config.log_dir) as job:
        start_ranks(job, node, script=script, trainer=trainer, environment=environment)
        job.wait()


if __name__ == "__main__":
    sys.exit(main())
