"""`spawn`: a function of the caller's on several ranks, each a new process, as paddle.distributed.spawn does it."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from common.credentials.credentials import current, environment_of
from common.errors import PeerError
from common.launch.child import ProcessFailed
from common.launch.first_calls import Name
from common.launch.job import Job
from common.launch.ranks import abstract_address, endpoints_of, paddle_environment
from common.launch.servers import start_servers
from common.launch.settings import Placement
from common.network.patience import WAIT_LIMIT_S
from common.system.process import JOB_SECRET_VARIABLE, PARENT_VARIABLE, prepare_process

__all__ = ["Spawned", "spawn"]

CHILD_SETTINGS = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONWARNINGS": "ignore:No ccache found"}
SETTLE_S = 1.5  # for the others to notice a failure
TERMINATE_S = 2.0
MOST_WORDS = 1 << 15  # bytes of a traceback: a pipe takes them though nobody reads yet


def spawn(
    scheme: str,
    func: Any,
    args: tuple[Any, ...],
    *,
    nprocs: int,
    join: bool = True,
    servers: int = 1,
    timeout: float = 30.0,
    wait_limit: float = WAIT_LIMIT_S,
) -> Spawned | None:
    """Run `func(*args)` on `nprocs` ranks; `func` must be importable, as for any multiprocessing.

    Args:
        nprocs: -1 for one rank a core.
        join: wait for all and return None; else return a Spawned, whose `join` does.
        servers: under "ps".
        timeout, wait_limit: of the servers, in seconds.

    Raises:
        ProcessFailed: the first rank that failed of itself, with its traceback.
    """
    nranks = (len(os.sched_getaffinity(0)) if nprocs == -1 else nprocs) or 1
    spawned = Spawned(scheme, func, args, nranks=nranks, servers=servers, timeout=timeout, wait_limit=wait_limit)
    if not join:
        return spawned
    spawned.join()
    return None


class Spawned:
    """The running ranks of a `spawn`, and their servers."""

    def __init__(
        self,
        scheme: str,
        func: Any,
        args: tuple[Any, ...],
        *,
        nranks: int,
        servers: int,
        timeout: float,
        wait_limit: float,
    ) -> None:
        self._resources = ExitStack()
        context = multiprocessing.get_context("spawn")
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        shared = {PARENT_VARIABLE: str(os.getpid()), **CHILD_SETTINGS}
        try:
            job = self._resources.enter_context(Job())
            if scheme == "ps":
                addresses = start_servers(job, servers, nranks=nranks, timeout=timeout, wait_limit=wait_limit)
                place = Placement(servers=tuple(addresses))
            else:
                place = Placement(rendezvous=abstract_address("spawn"))
            shared |= place.variables()
            shared |= {**environment_of(current()), JOB_SECRET_VARIABLE: job.secret}
            endpoints = endpoints_of(["127.0.0.1"], nranks)
            for rank in range(nranks):
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_be_a_rank, args=(theirs, func, args), name=Name(f"rank {rank}"))
                with added_to_environment({**shared, **paddle_environment(rank, endpoints)}):
                    process.start()  # the child reads its environment before it imports anything
                theirs.close()
                self.processes.append(process)
                self._pipes.append(mine)
        except BaseException:
            self._end()
            raise

    def join(self) -> None:
        """Wait for all ranks; see `spawn`."""
        try:
            while alive := [p.sentinel for p in self.processes if p.is_alive()]:
                wait(alive)
                if any(p.exitcode for p in self.processes):
                    wait_for_all(self.processes, SETTLE_S)
                    break
            failed = [i for i, p in enumerate(self.processes) if p.exitcode]
            if failed:
                raise self._failure(min(failed, key=lambda i: self.processes[i].exitcode == PeerError.exit_code))
        finally:
            self._end()

    def _failure(self, rank: int) -> ProcessFailed:
        code = self.processes[rank].exitcode
        told = ""
        with suppress(EOFError, OSError):  # it was killed before it could tell
            if self._pipes[rank].poll():  # else children that it has forked keep the pipe open
                told = self._pipes[rank].recv_bytes().decode(errors="replace")
        text = f"rank {rank} ended with exit code {code}" if code > 0 else f"rank {rank} was killed by signal {-code}"
        return ProcessFailed(f"{text}\n{told}".rstrip(), code if code > 0 else 128 - code)

    def _end(self) -> None:
        for process in self.processes:
            process.terminate()
        wait_for_all(self.processes, TERMINATE_S)
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._resources.close()


def wait_for_all(processes: list[Any], seconds: float) -> None:
    for process in processes:
        process.join(seconds)


def _be_a_rank(pipe: Any, func: Any, args: tuple[Any, ...]) -> None:
    prepare_process(of_user=True)
    try:
        func(*args)
    except SystemExit as exc:
        if exc.code:
            tell(pipe, exc)
        raise
    except BaseException as exc:
        tell(pipe, exc)
        sys.exit(getattr(exc, "exit_code", 1))


def tell(pipe: Any, exc: BaseException) -> None:
    """Say why this rank fails: to the others, as it leaves the group, and to whoever spawned it."""
    sys.last_value = exc
    pipe.send_bytes(traceback.format_exc().encode()[-MOST_WORDS:])


@contextmanager
def added_to_environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
