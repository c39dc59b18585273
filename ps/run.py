"""`python -m ps.run --trainers 4 --servers 1 [script.py ARGS...]`: trainers on this host, of one or of several, and, on
the first, the servers."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from common.launch.cli import run_command, split_script
from common.launch.flags import flags_with_a_script
from common.launch.hosts import Node, find_node, start_ranks
from common.launch.job import Job
from common.launch.joining import Joining
from common.launch.ranks import flags_of
from common.launch.servers import start_servers
from common.launch.settings import Placement, variables_of
from common.launch.tracing import check_one_host, collecting
from common.system.addresses import address_after
from ps.command_flags import RunConfig
from ps.flags import ScriptSettings

__all__ = ["main"]

NOT_TRAINERS = ("hosts", "install", "log_dir", "nranks", "servers", "data_port", "update")
FLAGS = flags_with_a_script(RunConfig, without=("mode", "staleness", "local_steps"))


def main(args: list[str] | None = None) -> int:
    flags, script = split_script(sys.argv[1:] if args is None else args, modules=True)
    return run_command(RunConfig, lambda config: run(config, script, flags), prog="ps.run", args=flags)


def run(config: RunConfig, script: list[str], given: list[str]) -> None:
    config.check_script(script, given)
    node = find_node(config.hosts, config.nranks, ports=config.servers, timeout=config.timeout)
    check_one_host(config.trace, script, node)
    alone = node.nnodes == 1
    joining = Joining(script, "ps", node.nranks, config.timeout, flags=FLAGS) if script else None
    with (
        collecting(config.trace if alone else None) as traced,
        Job(config.log_dir, all_ranks_here=alone, joining=joining) as job,
    ):
        place = Placement(servers=tuple(find_servers(job, node, config, traced)))
        trainer = ["-m", "ps.trainer", *flags_of(config, without=NOT_TRAINERS)]
        trainer += ["--nranks", str(node.nranks), "--servers", ",".join(place.servers)]
        environment = {**place.variables(), **variables_of(ScriptSettings, config), **traced}
        program = ["--install", "ps", *script] if script and config.install else script
        start_ranks(job, node, script=program, trainer=trainer, environment=environment)
        job.wait()


def find_servers(job: Job, node: Node, config: RunConfig, environment: Mapping[str, str]) -> list[str]:
    """The servers' addresses. On the first host they are started; others know at which ports it has them."""
    if node.index > 0:
        return [address_after(node.meeting_place, index) for index in range(config.servers)]
    first = node.meeting_place or "127.0.0.1:0"
    return start_servers(
        job,
        config.servers,
        nranks=node.nranks,
        timeout=config.timeout,
        wait_limit=config.wait_limit,
        first=first,
        data_port=config.data_port,
        environment=environment,
    )


if __name__ == "__main__":
    sys.exit(main())
