"""Starts a job's processes on this host, waits for them, and leaves nothing behind."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil

from common.errors import GradSyncError, PeerError, UsageError
from common.system.addresses import address_of
from common.system.process import JOB_SECRET_VARIABLE, LAST_WORDS_VARIABLE, PARENT_VARIABLE, Terminated

__all__ = [
    "FOLDER",
    "Job",
    "ProcessFailed",
    "abstract_address",
    "endpoints_of",
    "flags_of",
    "paddle_environment",
    "start_servers",
]

FOLDER = "gradsync-"  # and the launcher's process id
POLL_S = 0.02
SETTLE_S = 1.5  # how long the others may take to notice and name a failure before they are ended
CULPRIT_S = 5.0  # how long whoever has failed may take to end, after those who report it
TERMINATE_S = 2.0  # between SIGTERM and SIGKILL
TAIL_LINES = 12
FIRST_PORT = 6170  # in the names of ranks, as Paddle has it
IDLE_SERVER_S = 10.0  # how long servers may outlive the last rank


class ProcessFailed(GradSyncError):
    """A process of the job failed; the message holds its name, how it ended and the tail of its log."""

    def __init__(self, message: str, exit_code: int, *, words: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.words = words  # what it said itself, if it has no log: to be shown instead of the message


@dataclass
class Child:
    name: str  # "rank 2", "server 0"
    process: subprocess.Popen[bytes]
    log: Path | None  # None: it writes to this terminal
    words: Path  # its last ones, in that case
    ended_at: float | None = None

    @property
    def code(self) -> int | None:
        return self.process.poll()


@dataclass
class Job:
    """The processes of one run; a context manager that ends all of them when left, whatever happened.

    Args:
        log_dir: where `workerlog.N` and `serverlog.N` go; None: a temporary folder, removed at the end.
        patience: seconds that children have between SIGTERM and SIGKILL; None: TERMINATE_S.
        all_ranks_here: whether no other host has ranks of this job, so that all of them have its secret, by which they
            prove to one another that they belong to it.
    """

    log_dir: Path | None = None
    patience: float | None = None
    all_ranks_here: bool = True
    children: list[Child] = field(default_factory=list)
    secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    _not_now: bool = False  # a SIGTERM is only noted
    _terminated: bool = False
    _told_of_others: bool = False

    def __enter__(self) -> Job:
        remove_folders_of_the_dead()
        self._temporary = tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-")
        self._logs = self.log_dir or Path(self._temporary.name)
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            self._temporary.cleanup()
            raise UsageError(f"cannot write to --log-dir {self._logs}: {exc.strerror}") from exc
        self._previous = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        self._not_now = True  # a second signal must not leave anything behind
        interrupted: list[int] = []
        here = threading.current_thread() is threading.main_thread()  # only there handlers can be set
        before = signal.signal(signal.SIGINT, lambda number, _: interrupted.append(number)) if here else None
        try:
            self._end_all()
        finally:
            try:
                self._temporary.cleanup()
            finally:
                if here:
                    signal.signal(signal.SIGINT, before)
                    signal.signal(signal.SIGTERM, self._previous)
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return
        if self._terminated:
            raise Terminated
        if interrupted and callable(before):
            raise KeyboardInterrupt

    def _on_sigterm(self, *_: object) -> None:
        self._terminated = True
        if not self._not_now:
            raise Terminated

    @property
    def scratch(self) -> Path:
        """A folder of this job's own, removed at its end."""
        return Path(self._temporary.name)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: str,
        environment: Mapping[str, str] | None = None,
        on_terminal: bool = False,
        talk: bool = False,
        through: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Run `python COMMAND...` as a child that dies with this process.

        Args:
            name: as it appears in errors.
            log: file name in the log folder for its output.
            on_terminal: its output goes to this terminal instead (where no log folder was asked for).
            through: a command that starts it, as `mpirun -n 4`.
            talk: its stdin and stdout are pipes to the caller; only stderr goes to the log.
        """
        self._not_now = True  # a SIGTERM must not lose sight of the child
        inherit = on_terminal and self.log_dir is None
        path = None if inherit else self._logs / log
        words = self.scratch / f"words of {name}"
        output = None if path is None else path.open("wb")
        try:
            process = subprocess.Popen(
                [*through, sys.executable, *command],
                stdin=subprocess.PIPE if talk else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talk else output,
                stderr=output,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    **(environment or {}),
                    PARENT_VARIABLE: str(os.getpid()),
                    JOB_SECRET_VARIABLE: self.secret if self.all_ranks_here else "",
                    LAST_WORDS_VARIABLE: str(words) if inherit else "",
                },
            )
        finally:
            if output is not None:
                output.close()
        self.children.append(Child(name, process, path, words))
        self._not_now = False
        if self._terminated:
            self._on_sigterm()
        return process

    def wait(self) -> None:
        """Wait until every process has ended well. A training has no time limit; its waits inside have.

        Raises:
            ProcessFailed: for the process that failed first and not only because another had.
        """
        while not self._all_ended_well():
            if any(child.code for child in self.children):
                self._let_the_others_notice()
                raise self.failure()
            self._check_servers_were_used()
            time.sleep(POLL_S)
        if self.log_dir is not None:
            print(f"logs of {len(self.children)} processes: {self.log_dir}")

    def _check_servers_were_used(self) -> None:
        """A server ends with its trainers; one that outlives them all has never met them."""
        ranks_ended = [c.ended_at for c in self.children if not c.name.startswith("server")]
        if ranks_ended and all(ranks_ended) and time.monotonic() - max(t or 0.0 for t in ranks_ended) > IDLE_SERVER_S:
            if not self.all_ranks_here:  # those of other hosts end when they like
                if not self._told_of_others:
                    print("the ranks of this host have ended; its servers wait for those of others", file=sys.stderr)
                    self._told_of_others = True
                return
            raise UsageError(
                "all ranks have ended, but the servers still wait for them: "
                "the program never joined (does it import ps?)"
            )

    def check(self) -> None:
        """Raise ProcessFailed if any process has failed by now."""
        self._mark_ended()
        if any(child.code for child in self.children):
            self._let_the_others_notice()
            raise self.failure()

    def failure(self) -> ProcessFailed:
        self._mark_ended()
        failed = sorted((c for c in self.children if c.code), key=_blame)
        first = failed[0]
        code = first.code or 0
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        message = f"{first.name} {ended}"
        if first.log is not None:
            message += _tail(first.log, kept=self.log_dir is not None)
        words = first.words.read_text().strip() if first.words.exists() else ""
        return ProcessFailed(message, 128 - code if code < 0 else code, words=words)

    def _all_ended_well(self) -> bool:
        self._mark_ended()
        return all(child.code == 0 for child in self.children)

    def _mark_ended(self) -> None:
        for child in self.children:
            if child.ended_at is None and child.code is not None:
                child.ended_at = time.monotonic()

    def _let_the_others_notice(self) -> None:
        begin = time.monotonic()
        while running := [child for child in self.children if child.code is None]:
            unexplained = all(child.code == PeerError.exit_code for child in self.children if child.code)
            patience = CULPRIT_S if unexplained and not any(map(is_frozen, running)) else SETTLE_S
            if time.monotonic() > begin + patience:
                return
            time.sleep(POLL_S)
            self._mark_ended()

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """End one child, and all that it has started, before the others."""
        self._end([child for child in self.children if child.process is process])
        self.children = [child for child in self.children if child.process is not process]

    def _end_all(self) -> None:
        self._end(self.children)

    def _end(self, children: Sequence[Child]) -> None:
        running = [c.process for c in children if c.process.poll() is None]
        for process in running:
            _signal_group(process, signal.SIGTERM)
            _signal_group(process, signal.SIGCONT)  # a frozen one must hear it
        deadline = time.monotonic() + (TERMINATE_S if self.patience is None else self.patience)
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for child in children:
            _signal_group(child.process, signal.SIGKILL)  # what it started and did not end
            for pipe in (child.process.stdin, child.process.stdout):
                if pipe:
                    with suppress(BrokenPipeError):
                        pipe.close()


def is_frozen(child: Child) -> bool:
    """Whether it was stopped by SIGSTOP or the like, so that it will not end by itself."""
    try:
        return psutil.Process(child.process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def remove_folders_of_the_dead() -> None:
    """Temporary folders of launchers that were killed before they could remove them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}[0-9]*-*"):
        if not Path("/proc", folder.name.removeprefix(FOLDER).partition("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _signal_group(leader: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To a child and all that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, number)


def _blame(child: Child) -> tuple[bool, float]:
    """Processes that only report another's failure come last; among the rest, the first to end."""
    return (child.code == PeerError.exit_code, child.ended_at or 0.0)


def _tail(log: Path, *, kept: bool) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-TAIL_LINES:]
    where = f" of {log}" if kept else " of its output"
    return "".join(f"\n  | {line}" for line in [f"(last lines{where})", *lines]) if lines else " without a word"


def flags_of(config: Any, *, without: Sequence[str] = ()) -> list[str]:
    """The command-line flags that make this configuration again; defaults, and fields in `without`, are left out."""
    flags: list[str] = []
    for entry in fields(config):
        value = getattr(config, entry.name)
        if value == entry.default or entry.name in without:
            continue
        name = entry.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", str(value)]
    return flags


def abstract_address(name: str) -> str:
    """A gRPC address in Linux's abstract socket namespace: no port to be taken, no file to be left."""
    return f"unix-abstract:gradsync-{name}-{secrets.token_hex(8)}"


def endpoints_of(hosts: Sequence[str], ranks_each: int) -> tuple[str, ...]:
    """A name for every rank in the form that Paddle gives it: its host and a port. Nobody listens there."""
    return tuple(address_of(host, FIRST_PORT + local) for host in hosts for local in range(ranks_each))


def paddle_environment(rank: int, endpoints: Sequence[str], *, nnodes: int = 1) -> dict[str, str]:
    """What Paddle's own launcher tells a rank; `paddle.io.DistributedBatchSampler` reads it.

    Args:
        endpoints: of all ranks; equally many on each of `nnodes` hosts, one host after the other.
    """
    return {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(endpoints)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_LOCAL_RANK": str(rank % (len(endpoints) // nnodes)),
        "PADDLE_NNODES": str(nnodes),
    }


def start_servers(
    job: Job,
    count: int,
    *,
    nranks: int,
    timeout: float,
    first: str = "127.0.0.1:0",
    insecure: bool = False,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Start `count` parameter servers and return their addresses.

    Args:
        first: HOST:PORT of server 0; server I listens at port + I. With port 0 each takes a free one and tells which by
            a file, so that no port can be raced for.
        insecure: let them listen to other hosts.
    """
    host, _, port = first.rpartition(":")
    files = [job.scratch / f"server-{index}" for index in range(count)]
    for index, file in enumerate(files):
        flags = ["--host", host.strip("[]"), "--port", str(int(port) + index if int(port) else 0)]
        flags += ["--shard", f"{index}/{count}", "--address-file", str(file)]
        flags += ["--nranks", str(nranks), "--timeout", str(timeout), *["--insecure"] * insecure]
        command = ["-m", "ps.server", *flags]
        job.start(f"server {index}", command, log=f"serverlog.{index}", environment=environment)
    return [wait_for_file(file, job, timeout=timeout) for file in files]


def text_of(path: Path) -> str:
    """What a file holds; "" if there is none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def wait_for_file(path: Path, job: Job, *, timeout: float) -> str:
    """The content of a file that a child of `job` writes once it is ready.

    Raises:
        ProcessFailed: a child ended instead, or `timeout` seconds passed.
    """
    deadline = time.monotonic() + timeout
    while not (text := text_of(path)).endswith("\n"):
        job.check()
        if time.monotonic() > deadline or all(child.code is not None for child in job.children):
            what = f"{path.name.replace('-', ' ')} was not ready within {timeout:g} s"
            raise ProcessFailed(f"{what}; start fewer processes, or raise --timeout", 1)
        time.sleep(POLL_S)
    return text.strip()
