"""A group of processes that measure a collective operation when told to, and sleep in between."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.contestants.table_of_sweeps import is_encrypted, load_backend
from benchmarks.netlab.hosts import Hosts
from common.credentials.credentials import Credentials, using
from common.credentials.derived import SECRET_BYTES
from common.errors import GradSyncError
from common.launch.job import Job
from common.system.process_memory import ProcessMemory, added_since

__all__ = ["WARMUP", "MeasuredGroup", "mean_seconds", "seconds_of_each"]

START_S = 60.0  # for a group to come together
ANSWER_S = 300.0  # for a rank to measure one size
END_S, POLL_S = 10.0, 0.05  # for a rank whose connection has ended to end, too
WARMUP = 2  # calls before those that are timed


class MeasuredGroup:
    """The ranks of one backend as idle processes, one on each of `placed`; a context manager.

    Args:
        servers: the hosts of parameter servers, for a backend that has them.
        name: in errors and logs, of its own among the groups of a job. (default: the backend and the numbers)

    Raises:
        GradSyncError: they did not come together, or one died.
    """

    def __init__(
        self,
        job: Job,
        backend: str,
        hosts: Hosts,
        placed: Sequence[int],
        *,
        operation: str = "all_reduce",
        servers: Sequence[int] = (),
        name: str = "",
    ) -> None:
        self.backend, self.nranks = backend, len(placed)
        self.placed, self.servers = tuple(placed), tuple(servers)
        several = f" S={len(servers)}" if len(servers) > 1 else ""
        self._name = name or f"{backend} N={len(placed)}{several}"
        self._memory: list[Path] = []  # of each server, what it used before the first measurement
        self._operation = operation
        self._job, self._hosts, self._resources = job, hosts, ExitStack()

    def __enter__(self) -> MeasuredGroup:
        control = str(self._job.scratch / f"control-{secrets.token_hex(4)}")  # a path: hosts share the file system
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(control)
            listener.listen(self.nranks)
            listener.settimeout(START_S)
            with self._credentials():
                self._start(control)
            try:
                self._ranks = [self._accept(listener) for _ in range(self.nranks)]
            except TimeoutError as exc:
                self._job.check()
                raise GradSyncError(f"{self._name} did not come together within {START_S:g} s") from exc
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the processes leave. Idempotent; never raises, even if a job for one that died still lies in a buffer."""
        with suppress(OSError):
            self._resources.close()

    def _credentials(self) -> AbstractContextManager[None]:
        """Of the processes that are started within: a token of their own, by which they encrypt; else ours."""
        if not is_encrypted(self.backend):
            return nullcontext()
        return using(Credentials("token", self._name, secrets.token_bytes(SECRET_BYTES)), warn=False)

    def _start(self, control: str) -> None:
        module = load_backend(self.backend)
        uses_ports = self._hosts.emulated or getattr(module, "uses_ports", False)
        where = self.servers if hasattr(module, "SERVER") else self.placed
        endpoints = self._hosts.endpoints(where) if uses_ports else []
        address = ",".join(endpoints) or f"gradsync-sweep-{secrets.token_hex(8)}"
        worker = [
            "-m",
            "benchmarks.operations.worker",
            self._operation,
            self.backend,
            str(self.nranks),
            address,
            control,
        ]
        log = self._name.replace(" ", "-")
        if hasattr(module, "launch"):
            self._job.start(self._name, worker, log=log, through=module.launch(self.nranks))
            return
        for index, host in enumerate(self.servers if hasattr(module, "SERVER") else ()):
            self._memory.append(Path(f"{control}.server{index}"))
            server = ["-m", module.SERVER, endpoints[index], f"{index}/{len(endpoints)}", str(self.nranks)]
            server.append(str(self._memory[-1]))
            name = f"server {index} of {self._name}"
            self._job.start(name, server, log=f"{log}.server{index}", through=self._hosts.within(host))
        for rank, host in enumerate(self.placed):
            self._job.start(
                f"{self._name} rank {rank}",
                [*worker, str(rank)],
                log=f"{log}.{rank}",
                through=self._hosts.within(host),
                environment=self._hosts.environment,
            )

    def measure(
        self, nbytes: int, iterations: int, *, warmup: int = WARMUP, check: bool = True
    ) -> tuple[list[float], int]:
        """(seconds of each iteration; elements that were wrong on any rank). An iteration lasts from the end of the one
        before to its own, both on the rank that ends last: so together they take what was waited for, also where ranks
        of one core go ahead in turn, each fast in one call and slow in the next.

        Args:
            warmup: calls before those that are timed.
            check: make a first call whose result is checked.
        """
        job = {"count": nbytes // 4, "iterations": iterations, "warmup": warmup, "check": check}
        answers = self._ask(job)
        apart = all("ready" in answer for answer in answers)
        if apart:
            answers = self._ask({"begin": True})
        times = [answer["times"] for answer in answers]
        return (mean_seconds if apart else seconds_of_each)(times), sum(answer["wrong"] for answer in answers)

    def rest(self) -> None:
        """Give up the memory that the last measurement took, before others are measured."""
        self._ask({"rest": True})

    def wait(self, nbytes: int, late: float) -> float:
        """The largest share of a core that a rank used while it waited for the last one, which came `late` seconds
        after the others."""
        shares = [answer["core"] for answer in self._ask({"count": nbytes // 4, "late": late})]
        return max(float(share) for share in shares if share is not None)

    def _ask(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's answer."""
        try:
            for rank in self._ranks:
                rank.write(json.dumps(job) + "\n")
                rank.flush()
        except OSError as exc:
            self._job.check()
            raise GradSyncError(f"{self._name}: a rank ended between measurements") from exc
        answers = []
        for number, rank in enumerate(self._ranks):
            try:
                line = rank.readline()
            except TimeoutError as exc:
                self._job.check()
                raise GradSyncError(f"{self._name}: no answer from connection {number} within {ANSWER_S:g} s") from exc
            if not line:
                raise self._end_of_a_rank()
            answers.append(json.loads(line))
        return answers

    def server_memory(self) -> list[ProcessMemory]:
        """What each server now uses above what it did after its imports; of servers that do not tell, nothing."""
        try:
            return [added_since(file) for file in self._memory if file.exists()]
        except OSError as exc:
            self._job.check()
            raise GradSyncError(f"{self._name}: a server ended between measurements") from exc

    def _end_of_a_rank(self) -> GradSyncError:
        """Its connection ends before it does: why it ended is known a little later."""
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            try:
                self._job.check()
            except GradSyncError as exc:
                return exc
            time.sleep(POLL_S)
        return GradSyncError(f"{self._name}: a rank ended in mid-measurement")

    def _accept(self, listener: socket.socket) -> Any:
        connection, _ = listener.accept()
        connection.settimeout(ANSWER_S)
        lines = self._resources.enter_context(connection.makefile("rw"))
        self._resources.enter_context(connection)
        json.loads(lines.readline())
        return lines


def seconds_of_each(times: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each iteration, from all ranks' begin and ends; one clock serves all processes of a machine.

    >>> seconds_of_each([[0, 4, 5, 9], [1, 2, 6, 7]])
    [3, 2, 3]
    """
    return [end - begin for begin, end in pairwise(map(max, zip(*times, strict=True)))]


def mean_seconds(times: Sequence[Sequence[float]]) -> list[float]:
    """Likewise, of ranks that never meet: all iterations, from the first begin to the last end, take the same.

    >>> mean_seconds([[0, 4, 5, 9], [1, 2, 6, 7]])
    [3.0, 3.0, 3.0]
    """
    begins, *_, ends = zip(*times, strict=True)
    iterations = len(times[0]) - 1
    return [(max(ends) - min(begins)) / iterations] * iterations
