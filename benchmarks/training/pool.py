"""A pool of worker processes that run one training after the other, under whatever scheme."""

from __future__ import annotations

import json
import secrets
import select
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import convert, structs

from benchmarks.contestants.table_of_trainings import RIVALS, TORCH, Contestant
from benchmarks.netlab.hosts import Hosts
from benchmarks.records.compare import RankRecord
from benchmarks.training.tasks import Evaluate, HandOver, Serve, Task, TorchTrain, Train, Training
from benchmarks.training.watched import Watch
from common.errors import GradSyncError, PeerError, error_from_name
from common.launch.flags import TrainingConfig
from common.launch.job import Job
from common.launch.trace_file import write_trace
from common.launch.tracing import read_parts

__all__ = ["WorkerPool"]


@dataclass(frozen=True)
class Worker:
    name: str
    process: subprocess.Popen[bytes]

    @property
    def answers(self) -> IO[bytes]:
        assert self.process.stdout
        return self.process.stdout

    def tell(self, task: Task) -> None:
        assert self.process.stdin
        self.process.stdin.write(msgspec.json.encode(task) + b"\n")
        self.process.stdin.flush()

    def hear(self, expected: str) -> Any:
        """The worker's next answer, or the error it met. It has deadlines of its own; its death ends the wait.

        Raises:
            GradSyncError: what failed in the worker.
        """
        line = self.answers.readline()
        if not line:
            raise GradSyncError(f"the worker for {self.name} died (exit code {self.process.wait()})")
        answer = json.loads(line)
        if "error" in answer:
            raise error_from_name(*answer["error"])
        return answer[expected]


def hear_all(workers: Sequence[Worker]) -> list[Any]:
    """What each has done. The death of one ends the wait for the others, who may be long in noticing it.

    Raises:
        GradSyncError: the first error that is not merely the consequence of another worker's.
    """
    done: dict[str, Any] = {}
    errors: list[GradSyncError] = []
    waiting = {worker.answers: worker for worker in workers}
    while waiting:
        for pipe in select.select(waiting, (), ())[0]:
            worker = waiting.pop(pipe)
            try:
                done[worker.name] = worker.hear("done")
            except GradSyncError as exc:
                if worker.process.returncode is not None:
                    raise
                errors.append(exc)
    if errors:
        raise min(errors, key=lambda error: isinstance(error, PeerError))
    return [done[worker.name] for worker in workers]


class WorkerPool:
    """`ranks` + `servers` idle processes with Paddle imported, and more, started when they are needed, for Paddle's own
    groups and with PyTorch imported; a context manager.

    Rank r is on host r of `hosts`, server s on host `ranks` + s.
    """

    def __init__(self, ranks: int, servers: int, hosts: Hosts) -> None:
        self._job, self._hosts = Job(), hosts
        self._sizes = (ranks, servers)
        self._paddle: dict[int, tuple[list[Worker], list[str]]] = {}  # by number of ranks
        self._torch: list[Worker] = []

    def __enter__(self) -> WorkerPool:
        self._job.__enter__()
        try:
            ranks, servers = self._sizes
            self._ranks = [self._start(f"rank {i}", i) for i in range(ranks)]
            self._servers = [self._start(f"server {i}", ranks + i) for i in range(servers)]
            for worker in [*self._ranks, *self._servers]:
                worker.hear("ready")
        except BaseException as exc:
            self._job.__exit__(type(exc), exc, exc.__traceback__)
            raise
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._job.__exit__(kind, error, traceback)

    def run(
        self,
        contestant: Contestant,
        config: TrainingConfig,
        *,
        warmup_steps: int,
        evaluate: bool = True,
        keep: Path | None = None,
        watch: Watch | None = None,
        trace: Path | None = None,
    ) -> list[RankRecord]:
        """One training; returns every rank's run record (see common/trainer/record.py).

        Args:
            keep: rank 0 writes its parameters there (.npz: for each name, [before, after] stacked).
            watch: how the training is slowed, and what rank 0 keeps of it.
            trace: folder in which a trace is left under the contestant's name; other libraries leave none.

        Raises:
            GradSyncError: the first error that is not merely the consequence of another rank's.
        """
        servers = self._servers[: contestant.servers]
        traced = trace is not None and contestant.scheme not in RIVALS
        parts = tempfile.mkdtemp(dir=self._job.scratch) if traced else None
        addresses = self._begin_serving(servers, contestant.nranks, config.timeout, parts)
        training, kept = Training.of(config), str(keep) if keep else None
        if contestant.scheme == TORCH:
            ranks = self._torch_ranks(contestant.nranks)
            task: Train | TorchTrain = self._handed_over(training, contestant.nranks, warmup_steps, evaluate=evaluate)
        else:
            ranks, endpoints = self._our_ranks(contestant)
            task = Train(
                training=training,
                rank=0,
                nranks=contestant.nranks,
                scheme=contestant.scheme,
                backend=contestant.backend,
                mode=contestant.mode,
                sharded=contestant.sharded,
                servers=addresses,
                rendezvous=self._hosts.meeting_place(),
                warmup_steps=warmup_steps,
                evaluate=evaluate,
                watch=watch.to_json() if watch else None,
                trace=parts,
                endpoints=endpoints,
                keep=None,
            )
        for rank, worker in enumerate(ranks):
            worker.tell(structs.replace(task, rank=rank, keep=None if rank else kept))
        records = hear_all([*ranks, *servers])
        if trace and parts:
            trace.mkdir(parents=True, exist_ok=True)
            write_trace(trace / f"{contestant.stem}.json", read_parts(Path(parts)))
        return convert(records[: contestant.nranks], list[RankRecord])

    def evaluate(self, config: TrainingConfig, file: Path, rows: Sequence[int]) -> list[float]:
        """The accuracy on the test split, 0..1, of some of the parameters in `file` (see Watched.save). All ranks share
        the work.

        Raises:
            GradSyncError: the first error that a worker met.
        """
        shares = [(worker, rows[index :: len(self._ranks)]) for index, worker in enumerate(self._ranks)]
        for worker, mine in shares:
            worker.tell(Evaluate(training=Training.of(config), file=str(file), rows=list(mine)))
        found = {row: value for worker, mine in shares for row, value in zip(mine, worker.hear("done"), strict=True)}
        return [found[row] for row in rows]

    def _start(self, name: str, host: int, *, library: str = "paddle") -> Worker:
        log, through = name.replace(" ", "-"), self._hosts.within(host)
        command, environment = ["-m", "benchmarks.training.worker", library], self._hosts.environment
        process = self._job.start(name, command, log=log, talk=True, through=through, environment=environment)
        return Worker(name, process)

    def _our_ranks(self, contestant: Contestant) -> tuple[list[Worker], list[str]]:
        """Those with Paddle, and their addresses if Paddle is to connect them."""
        if contestant.scheme == "paddle" and contestant.nranks > 1:
            return self._paddle_group(contestant.nranks)
        return self._ranks[: contestant.nranks], []

    def _paddle_group(self, nranks: int) -> tuple[list[Worker], list[str]]:
        """The ranks for paddle.distributed, whose group cannot change its size, and their addresses."""
        if nranks not in self._paddle:
            workers = [self._start(f"paddle rank {i} of {nranks}", i) for i in range(nranks)]
            for worker in workers:
                worker.hear("ready")
            self._paddle[nranks] = workers, self._hosts.endpoints(range(nranks))
        return self._paddle[nranks]

    def _torch_ranks(self, nranks: int) -> list[Worker]:
        """So many ranks for torch.distributed, which form a group anew for each training."""
        more = [self._start(f"torch rank {i}", i, library="torch") for i in range(len(self._torch), nranks)]
        for worker in more:
            worker.hear("ready")
        self._torch += more
        return self._torch[:nranks]

    def _handed_over(self, training: Training, nranks: int, warmup_steps: int, *, evaluate: bool) -> TorchTrain:
        """A task for PyTorch; a process with Paddle writes the file that it begins with."""
        file, meeting = self._job.scratch / "start.npz", self._job.scratch / f"meeting-{secrets.token_hex(4)}"
        self._ranks[0].tell(HandOver(training=training, nranks=nranks, file=str(file)))
        return TorchTrain(
            training=structs.replace(training, data_dir=self._ranks[0].hear("done")),
            rank=0,
            nranks=nranks,
            file=str(file),
            rendezvous=str(meeting),
            warmup_steps=warmup_steps,
            evaluate=evaluate,
            keep=None,
        )

    def _begin_serving(self, servers: Sequence[Worker], nranks: int, timeout: float, parts: str | None) -> list[str]:
        for index, worker in enumerate(servers):
            host = self._hosts.address(self._sizes[0] + index)
            shard = (index, len(servers))
            worker.tell(Serve(host=host, nranks=nranks, shard=shard, timeout=timeout, trace=parts))
        return [worker.hear("address") for worker in servers]
