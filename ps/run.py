"""`python -m ps.run --trainers 4 --servers 1 [script.py ARGS...]`: trainers on this host, of one or of several, and, on
the first, the servers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial

from common.errors import UsageError
from common.launch.adoption import adoption_of
from common.launch.cli import check_is_there, run_command, split_script
from common.launch.engines import Task, task_from
from common.launch.flags import flags_with_a_script
from common.launch.hosts import Node, Place, find_place, start_rank
from common.launch.job import Job
from common.launch.joining import Joining
from common.launch.mending import mending
from common.launch.ranks import flags_of
from common.launch.restarts import Life, supervise
from common.launch.servers import Servers, start_servers
from common.launch.settings import Placement, placement_from, servers_among, variables_of
from common.launch.tasks import become_rank, task_here
from common.launch.tracing import check_one_host, collecting
from common.system.addresses import address_after
from ps.command_flags import RunConfig
from ps.flags import ScriptSettings
from ps.store.modes import SYNC

__all__ = ["main"]

NOT_TRAINERS = ("hosts", "install", "log_dir", "nranks", "on", "restarts", "servers", "data_port", "update")
FLAGS = flags_with_a_script(RunConfig, without=("mode", "staleness", "local_steps"))


def main(args: list[str] | None = None) -> int:
    flags, script = split_script(sys.argv[1:] if args is None else args, modules=True)
    return run_command(RunConfig, lambda config: run(config, script, flags), prog="ps.run", args=flags)


def run(config: RunConfig, script: list[str], given: list[str]) -> None:
    config.check_script(script, given)
    check_is_there(script)
    adoption = adoption_of(config, "ps.run", [*given, *script])
    if config.on.engine:
        config.on.check(config.hosts, traced=config.trace is not None)
        run_with_ray(config, script)
        return
    servers, addresses = servers_told(config, given)
    refused = {"log-dir": config.log_dir, "trace": config.trace if script else None, **config.restarts.asked_for}
    if task := task_here(config.hosts, config.nranks, servers=servers, refused=refused):
        become_one(task, servers, addresses, config, script)
        return
    restarts = config.restarts.max_restarts > 0
    ports = config.servers
    with find_place(config.hosts, config.nranks, ports=ports, timeout=config.timeout, restarts=restarts) as place:
        check_one_host(config.trace, script, place.node)
        supervise(
            config.restarts,
            partial(run_once, config, script, place),
            prog="ps.run",
            agree=place.agree,
            epoch=place.node.epoch,
            adoption=adoption,
        )


def run_once(config: RunConfig, script: list[str], hosts: Place, life: Life) -> None:
    """Start the trainers of this host and, on the first, the servers, and wait until they have ended well."""
    node = hosts.node
    alone = node.nnodes == 1
    joining = Joining(script, "ps", node.nranks, config.timeout, flags=FLAGS) if script else None
    with (
        collecting(config.trace if alone else None) as traced,
        Job(
            config.log_dir,
            all_ranks_here=alone,
            joining=joining,
            life=life,
            keeps=can_replace(config),
            begins=not script,
            ranks_each=len(node.ranks) if node.nnodes > 1 else 0,
        ) as job,
    ):

        def start(rank: int, addresses: str) -> None:
            place = Placement(servers=tuple(addresses.split(",")))
            trainer, environment = started_with(config, node.nranks, place)
            given = {**environment, **traced}
            start_rank(rank, job, hosts.node, script=program_of(config, script), trainer=trainer, environment=given)

        servers = servers_here(job, node, config, traced) if node.index == 0 else None
        addresses = ""
        if not job.was_adopted:
            addresses = ",".join(servers.start_all() if servers else servers_of_first(node, config))
            for rank in node.ranks:
                start(rank, addresses)
        if job.keeps:
            job.mends = mending(job, start, hosts, config, addresses, servers)
        job.wait()


def can_replace(config: RunConfig) -> bool:
    """Whether a trainer or server that has died can be replaced while the others go on."""
    return bool(config.restarts.max_restarts) and config.consistency == SYNC


def run_with_ray(config: RunConfig, script: list[str]) -> None:
    """As actors on a cluster of Ray's."""
    from common.launch.on_ray.ray_job import RayJob
    from common.launch.on_ray.running import run_on_ray

    def start(job: RayJob) -> None:
        nranks, hosts = job.seats.nranks, [job.seats.hosts[f"server {i}"] for i in range(config.servers)]
        addresses = start_servers(
            job,
            config.servers,
            nranks=nranks,
            timeout=config.timeout,
            wait_limit=config.wait_limit,
            hosts=hosts,
            data_port=config.data_port,
            checkpoint_dir=config.checkpoint_dir,
        )
        trainer, environment = started_with(config, nranks, Placement(servers=tuple(addresses)))
        job.start_ranks(program_of(config, script), trainer, environment)

    run_on_ray(
        config.on,
        start,
        package="ps",
        script=script,
        launcher=FLAGS,
        nranks=config.nranks,
        servers=config.servers,
        timeout=config.timeout,
        log_dir=config.log_dir,
        restarts=config.restarts,
    )


def servers_told(config: RunConfig, given: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """How many of an engine's tasks serve, and, where none does, the servers that are there: by --servers, else by
    GRADSYNC_SERVERS."""
    if any(word.partition("=")[0] == "--servers" for word in given):
        return config.servers, ()
    if addresses := placement_from().servers:
        return 0, addresses
    task = task_from()
    return (servers_among(task) if task is not None else 0) or config.servers, ()


def become_one(task: Task, servers: int, addresses: tuple[str, ...], config: RunConfig, script: list[str]) -> None:
    """One of an engine's tasks serves, until the training is over, or is one trainer."""
    from ps.server import prepare_server
    from ps.serving import find_servers

    if servers >= task.count:
        raise UsageError(f"--servers {servers} leaves none of {task.count} tasks to train; start more of them")
    if task.index < servers:
        prepare_server()
    if servers and not (addresses := find_servers(task, servers, config)):
        return
    nranks = task.count - servers
    trainer, environment = started_with(config, nranks, Placement(servers=addresses))
    become_rank(
        task,
        task.index - servers,
        nranks,
        script=program_of(config, script),
        trainer=trainer,
        environment=environment,
    )


def started_with(config: RunConfig, nranks: int, place: Placement) -> tuple[list[str], dict[str, str]]:
    """The command line of the built-in trainer without its rank, and what is in the environment of any rank."""
    trainer = ["-m", "ps.trainer", *flags_of(config, without=NOT_TRAINERS)]
    trainer += ["--nranks", str(nranks), "--servers", ",".join(place.servers)]
    return trainer, {**place.variables(), **variables_of(ScriptSettings, config)}


def program_of(config: RunConfig, script: list[str]) -> list[str]:
    return ["--install", "ps", *script] if script and config.install else script


def servers_of_first(node: Node, config: RunConfig) -> list[str]:
    """The addresses of the servers on the first host, as another one knows them."""
    return [address_after(node.meeting_place, index) for index in range(config.servers)]


def servers_here(job: Job, node: Node, config: RunConfig, environment: Mapping[str, str]) -> Servers:
    """Those of the first host."""
    return Servers(
        job,
        config.servers,
        nranks=node.nranks,
        timeout=config.timeout,
        wait_limit=config.wait_limit,
        first=node.meeting_place or "127.0.0.1:0",
        data_port=config.data_port,
        environment=environment,
        checkpoint_dir=config.checkpoint_dir,
    )


if __name__ == "__main__":
    sys.exit(main())
