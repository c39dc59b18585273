"""A job under a launcher with `--max-restarts` whose processes somebody kills: who they are, and what comes of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from benchmarks.netlab.cluster import Cluster, why_no_cluster
from benchmarks.netlab.hosts import Hosts, OneHost
from benchmarks.records.faults import Recovery, Usage
from common.commit.folder import CommitFolder
from common.credentials.credentials import TOKEN_VARIABLE, environment_of, find
from common.credentials.token import new_token
from common.errors import GradSyncError
from common.system.process import JOINED_VARIABLE

__all__ = ["Killing", "Role"]

POLL_S = 0.005
END_S, STEP_S = 60.0, 0.02  # what takes longer than this and so much for each step of the job hangs
MODULES = {"collective.trainer": "rank", "ps.trainer": "rank", "ps.server": "server"}
TRAINING = ["--model", "mlp:16", "--dataset", "digits", "--batch-size", "8"]
RECOVERED = re.compile(r"\brecovered: (?:.* (\d+) steps? replayed)?")
ADDRESS_FLAG = "--address-file"  # of a server
MEGABYTE = 1e6

Role = tuple[str, psutil.Process]  # "rank 1", "server 0" or "launcher 0"


@dataclass
class Killing:
    """A context manager, at whose end nothing of the job is left.

    Args:
        scheme: ring or ps.
        backend: how data travel, as --backend or --data-plane has it.
        every: steps between two commits.
        restarts: how many it may make.
        hosts: how many launchers it has, each on an emulated host, or, where none can be, all on this machine.
    """

    scheme: str
    backend: str
    nranks: int
    steps: int
    every: int = 20
    restarts: int = 2
    hosts: int = 1
    killed: list[float] = field(default_factory=list)  # when somebody was, monotonic seconds
    recoveries: list[Recovery] = field(default_factory=list)
    _recovered: list[tuple[float, int | None]] = field(default_factory=list)  # when, and steps replayed
    _lines: list[str] = field(default_factory=list)
    _readers: dict[int, threading.Thread] = field(default_factory=dict)  # of what each launcher says

    def __enter__(self) -> Killing:
        with ExitStack() as opened:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="gradsync-kills-")))
            emulated = self.hosts > 1 and not why_no_cluster()
            hosts: Hosts = Cluster([0.0] * self.hosts) if emulated else OneHost()
            self._start(folder, opened.enter_context(hosts))
            self._opened = opened.pop_all()
        return self

    def _start(self, folder: Path, hosts: Hosts) -> None:
        self._record, self._commits = folder / "record.json", CommitFolder(folder / "commits")
        ring = ["collective.run", "--nranks", self.nranks, "--backend", self.backend]
        servers = ["ps.run", "--trainers", self.nranks, "--servers", 1, "--data-plane", self.backend]
        files = ["--json", self._record, "--log-dir", folder / "logs"]
        kept = ["--checkpoint-dir", self._commits.path, "--commit-every", self.every]
        flags = [*(servers if self.scheme == "ps" else ring), *TRAINING, "--steps", self.steps, *files, *kept]
        command = [sys.executable, "-m", *map(str, flags), "--max-restarts", str(self.restarts)]
        several = self.hosts > 1
        place = ["--nnodes", str(self.hosts), "--master", *hosts.endpoints([0])] if several else []
        token = environment_of(find(environment={TOKEN_VARIABLE: new_token()})) if hosts.emulated else {}
        place += ["--host-wait", str(END_S)] if several else []
        self.begun = time.monotonic()
        self._commands = [
            [*hosts.within(host), *command, *place, *(["--node-rank", str(host)] if several else [])]
            for host in range(self.hosts)
        ]
        self._environment = {**os.environ, **hosts.environment, **token}
        self._processes = [self._launch(host) for host in range(self.hosts)]

    def _launch(self, host: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self._commands[host],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr
        self._readers[host] = threading.Thread(
            target=self._read, args=(process.stderr, host), name=f"gradsync-lines-{host}", daemon=True
        )
        self._readers[host].start()
        return process

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reader in self._readers.values():
            reader.join()
        self._opened.close()

    def _read(self, stderr: IO[str], host: int) -> None:
        with stderr:
            for line in stderr:
                if not host:
                    self._lines.append(line.rstrip())
                if found := RECOVERED.search(line):
                    self._recovered.append((time.monotonic(), int(found[1]) if found[1] else None))

    @property
    def launchers(self) -> list[Role]:
        return [
            (f"launcher {host}", psutil.Process(process.pid))
            for host, process in enumerate(self._processes)
            if process.poll() is None
        ]

    @property
    def lines(self) -> list[str]:
        """That the first launcher has said."""
        return list(self._lines)

    @property
    def over(self) -> bool:
        """One launcher has ended well, which they do together, or all have ended."""
        codes = [process.poll() for process in self._processes]
        return 0 in codes or None not in codes

    @property
    def step(self) -> int:
        """Of the newest commit."""
        return max(self._commits.steps(), default=0)

    @property
    def in_the_midst(self) -> bool:
        """Whether all have made a step for certain, and none is near the last one."""
        return self.every <= self.step <= 4 * self.steps // 5

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for it, or for the job's end.

        Raises:
            GradSyncError: neither came.
        """
        limit = END_S + self.steps * STEP_S
        deadline = time.monotonic() + limit
        while not (condition() or self.over):
            if time.monotonic() > deadline:
                raise GradSyncError(f"no {what} within {limit:g} s: {self._lines[-3:]}")
            time.sleep(POLL_S)

    def alive(self) -> list[Role]:
        """Its ranks and servers."""
        return sorted((role for _, launcher in self.launchers for role in alive_of(launcher)), key=lambda each: each[0])

    def kill(self, choose: Callable[[Sequence[Role]], Role], *, launchers: bool = False) -> str:
        """One of them, once there is one; who it was, "" if the job has ended.

        Waits until the group is complete again, and notes how long that took.

        Args:
            launchers: they may be chosen too; who takes the place of one is started at once.
        """
        self.until(lambda: bool(self.alive()), "process")
        there = self.alive()
        if not there:
            return ""
        who, victim = choose([*there, *(self.launchers if launchers else [])])
        lost = {who, *(role for role, _ in alive_of(victim))}
        others = {role: process for role, process in there if role not in lost}
        seen = len(self._recovered)
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            return ""
        self.killed.append(time.monotonic())
        if who.startswith("launcher"):
            self._replace(int(who.removeprefix("launcher ")))
        else:
            self.until(lambda: any(each == who and process != victim for each, process in self.alive()), "new process")
        new_at = time.monotonic()
        self.until(lambda: self._begun_anew(lost, there) or len(self._recovered) > seen, "start of the new process")
        begun_at = time.monotonic()
        self.until(lambda: len(self._recovered) > seen, "recovery")
        if len(self._recovered) > seen:
            recovered, replayed = self._recovered[seen]
            whole, starting = recovered - self.killed[-1], min(begun_at, recovered) - new_at
            now = dict(self.alive())
            stayed = all(now.get(role, process) == process for role, process in others.items())
            self.recoveries.append(Recovery(round(whole, 3), round(starting, 3), replayed, stayed))
        return who

    def _begun_anew(self, lost: set[str], before: Sequence[Role]) -> bool:
        """Whether all ranks and servers have their imports behind them, also those that came for lost ones."""
        old, now = dict(before), dict(self.alive())
        new = all(who in now and now[who] != old[who] for who in lost if who in old)
        everyone = self.nranks + (self.scheme == "ps")
        return new and len(now) == everyone and all(map(has_begun, now.values()))

    def _replace(self, host: int) -> None:
        """Its launcher, which was killed."""
        self._processes[host].wait()
        self._readers[host].join()
        self._processes[host] = self._launch(host)

    def usage(self) -> list[Usage]:
        """Of the launcher and all processes."""
        found = []
        for who, process in [*self.launchers[:1], *self.alive()]:
            with suppress(psutil.Error):
                found.append(usage_of(who.replace("launcher 0", "launcher"), process))
        return found

    def digest(self) -> str:
        """Of the parameters, at its end, which is waited for; else what it said last.

        Raises:
            GradSyncError: it does not end.
        """
        self.until(lambda: False, "end of the job")
        self._readers[0].join(END_S)
        if not self._record.exists():
            return f"exit code {self._processes[0].poll()}: {' | '.join(self._lines[-3:])}"
        return str(json.loads(self._record.read_text())["parameters_sha256"])


def alive_of(launcher: psutil.Process) -> list[Role]:
    """Its ranks and servers; none of another process."""
    found = []
    with suppress(psutil.Error):
        for child in launcher.children():
            with suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE and (who := named(child.cmdline())):
                    found.append((who, child))
    return found


def has_begun(process: psutil.Process) -> bool:
    """Whether a rank has told its launcher that it joins a group, or a server where it listens."""
    with suppress(psutil.Error):
        command = process.cmdline()
        if ADDRESS_FLAG in command:
            return Path(command[command.index(ADDRESS_FLAG) + 1]).exists()
        noted = Path(process.environ().get(JOINED_VARIABLE, ""))
        return noted.is_file() and bool(noted.read_text())
    return False


def usage_of(who: str, process: psutil.Process) -> Usage:
    with process.oneshot():
        memory = process.memory_full_info().uss / MEGABYTE
        return Usage(who, round(memory, 1), process.num_fds(), process.num_threads())


def named(command: Sequence[str]) -> str:
    """Who is started by this."""
    for module, kind in MODULES.items():
        if module in command:
            flag = "--rank" if kind == "rank" else "--shard"
            number = command[command.index(flag) + 1] if flag in command else "0"
            return f"{kind} {number.partition('/')[0]}"
    return ""
