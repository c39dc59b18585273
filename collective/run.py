"""`python -m collective.run --nranks 4 [script.py ARGS...]`: a ring's ranks on this host, of one or of several."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import NoReturn

from collective.command_flags import CollectiveRunConfig
from collective.flags import RingSettings
from collective.nccl.seat import gpus_for, require_nccl
from common.launch.adoption import adoption_of
from common.launch.cli import check_is_there, run_command, split_script
from common.launch.engines import Task
from common.launch.flags import flags_with_a_script
from common.launch.hosts import Node, Place, find_place, start_rank
from common.launch.job import Job
from common.launch.joining import Joining
from common.launch.mending import mending
from common.launch.ranks import abstract_address, flags_of
from common.launch.restarts import Life, supervise
from common.launch.settings import SERVERS_VARIABLE, Placement, variables_of
from common.launch.tasks import become_rank, place_of, task_here
from common.launch.tracing import check_one_host, collecting

__all__ = ["main"]

NOT_RANKS = ("hosts", "install", "log_dir", "nranks", "on", "restarts")
FLAGS = flags_with_a_script(CollectiveRunConfig, without=("shard_optimizer",))


def main(args: list[str] | None = None) -> int:
    flags, script = split_script(sys.argv[1:] if args is None else args, modules=True)
    return run_command(
        CollectiveRunConfig, lambda config: run(config, script, flags), prog="collective.run", args=flags
    )


def run(config: CollectiveRunConfig, script: list[str], given: list[str]) -> None:
    config.check_script(script, given)
    check_is_there(script)
    adoption = adoption_of(config, "collective.run", [*given, *script])
    if config.on.engine:
        config.on.check(config.hosts, traced=config.trace is not None, backend=config.backend)
        run_with_ray(config, script)
        return
    if config.backend.startswith("nccl"):
        require_nccl(config.nccl_binding)
    refused = {"log-dir": config.log_dir, "trace": config.trace if script else None, **config.restarts.asked_for}
    if task := task_here(config.hosts, config.nranks, refused=refused):
        become_one(task, config, script)
    restarts = config.restarts.max_restarts > 0
    with find_place(config.hosts, config.nranks, ports=1, timeout=config.timeout, restarts=restarts) as place:
        config = replace(config, backend=backend_here(config, place.node))
        check_one_host(config.trace, script, place.node)
        supervise(
            config.restarts,
            partial(run_once, config, script, place),
            prog="collective.run",
            agree=place.agree,
            epoch=place.node.epoch,
            adoption=adoption,
        )


def run_once(config: CollectiveRunConfig, script: list[str], hosts: Place, life: Life) -> None:
    """Start the ranks of this host, and wait until they have ended well."""
    node = hosts.node
    joining = Joining(script, "collective", node.nranks, config.timeout, flags=FLAGS) if script else None
    with (
        collecting(config.trace if node.nnodes == 1 else None) as traced,
        Job(
            config.log_dir,
            all_ranks_here=node.nnodes == 1,
            joining=joining,
            life=life,
            keeps=can_replace(config),
            begins=not script,
            ranks_each=len(node.ranks) if node.nnodes > 1 else 0,
        ) as job,
    ):

        def start(rank: int, rendezvous: str) -> None:
            trainer, environment = started_with(config, node.nranks, rendezvous)
            given = {**environment, **traced}
            start_rank(rank, job, hosts.node, script=program_of(config, script), trainer=trainer, environment=given)

        place = node.meeting_place or abstract_address("ring")
        for rank in () if job.was_adopted else node.ranks:
            start(rank, place)
        if job.keeps:
            job.mends = mending(job, start, hosts, config, place)
        job.wait()
        if joining is not None and config.install and node.nranks == len(job.children) > 1:
            joining.needless(job.children)


def run_with_ray(config: CollectiveRunConfig, script: list[str]) -> None:
    """As actors on a cluster of Ray's."""
    from common.launch.on_ray.ray_job import RayJob
    from common.launch.on_ray.running import run_on_ray

    def start(job: RayJob) -> None:
        trainer, environment = started_with(config, job.seats.nranks, job.seats.meeting_place)
        job.start_ranks(program_of(config, script), trainer, environment)

    run_on_ray(
        config.on,
        start,
        package="collective",
        script=script,
        launcher=FLAGS,
        nranks=config.nranks,
        timeout=config.timeout,
        log_dir=config.log_dir,
        restarts=config.restarts,
    )


def can_replace(config: CollectiveRunConfig) -> bool:
    """Whether a rank that has died can be replaced while the others go on."""
    return bool(config.restarts.max_restarts) and not config.backend.startswith("nccl")


def become_one(task: Task, config: CollectiveRunConfig, script: list[str]) -> NoReturn:
    """One of an engine's tasks is one rank."""
    trainer, environment = started_with(config, task.count, place_of(task))
    become_rank(
        task,
        task.index,
        task.count,
        script=program_of(config, script),
        trainer=trainer,
        environment={SERVERS_VARIABLE: "", **environment},
    )


def started_with(config: CollectiveRunConfig, nranks: int, rendezvous: str) -> tuple[list[str], dict[str, str]]:
    """The command line of the built-in trainer without its rank, and what is in the environment of any rank."""
    trainer = ["-m", "collective.trainer", *flags_of(config, without=NOT_RANKS)]
    trainer += ["--nranks", str(nranks), "--rendezvous", rendezvous]
    return trainer, {**Placement(rendezvous=rendezvous).variables(), **variables_of(RingSettings, config)}


def program_of(config: CollectiveRunConfig, script: list[str]) -> list[str]:
    return ["--install", "collective", *script] if script and config.install else script


def backend_here(config: CollectiveRunConfig, node: Node) -> str:
    """What `auto` means on this host: nccl if each rank has a GPU; several hosts must say nccl themselves."""
    if config.backend != "auto" or node.nnodes > 1:
        return config.backend
    ranks = len(node.ranks)
    if missing := gpus_for(ranks, config.nccl_binding):
        if not missing.startswith("no GPU"):
            print(f"backend shm, not nccl: {missing}")
        return "auto"
    print(f"backend nccl: a GPU for each of {ranks} ranks")
    return "nccl"


if __name__ == "__main__":
    sys.exit(main())
