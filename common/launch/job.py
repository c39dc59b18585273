"""The processes of a run on this host: started, waited for, and ended, whatever happens."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from common.commit.kept_parts import COPIES_VARIABLE, KEPT_VARIABLE, make_kept
from common.credentials.credentials import current, environment_of
from common.credentials.derived import SECRET_BYTES
from common.errors import PeerError, UsageError
from common.launch.adoption import KeptJob
from common.launch.child import MISSING, Child, ProcessFailed, end_all, failure_of, until_one_ends
from common.launch.folders import note_session, remove_folders_of_the_dead
from common.launch.joining import Joining
from common.launch.restarts import Life
from common.launch.shown_log import ShownLog
from common.system.atomic_file import not_written
from common.system.fault_points import FAULT_HERE_VARIABLE, FAULT_VARIABLE, fault_for
from common.system.leftovers import FOLDER, Session
from common.system.next_epoch import WORD_VARIABLE
from common.system.out_of_memory import killed_for_memory
from common.system.private_files import open_private
from common.system.process import (
    JOB_SECRET_VARIABLE,
    JOINED_VARIABLE,
    LAST_WORDS_VARIABLE,
    PARENT_VARIABLE,
    RESTARTS_VARIABLE,
    Terminated,
)

__all__ = ["FOLDER", "Job"]

POLL_S = 0.02
CALM_POLL_S = 0.1  # while nothing is wrong; who ends is seen at once
SHOW_CURSOR = "\x1b[?25h"
LOOK_S = 0.5  # between two looks at how much memory each has
CULPRIT_S = 5.0  # how long whoever has failed may take to end, after those who report it


@dataclass
class Job:
    """The processes of one run; a context manager that ends all of them when left, whatever happened.

    Args:
        log_dir: where `workerlog.N` and `serverlog.N` go; None: a temporary folder, removed at the end.
        patience: seconds that children have between SIGTERM and SIGKILL.
        settle: seconds that the others may take to notice and name a failure before they are ended.
        idle: seconds that servers may outlive the last rank.
        all_ranks_here: whether no other host has ranks of this job, so that all of them have its secret, by which they
            prove to one another that they belong to it.
        joining: watches whether ranks join, where they run a program of the user's.
        life: which of the job's this is, where it is started again after a failure.
        keeps: whether its processes can leave a part of their state to those that take their places; and
        begins: whether, as long as one has none yet, all can begin again in another group.
        ranks_each: how many ranks each of several hosts has, if they can leave it on another one too; 0: they cannot.
        terminal: standard output and error of what would write to this terminal; None: this process's own.
        clock, pause, calm_pause: by which it waits.
    """

    log_dir: Path | None = None
    patience: float = 2.0
    settle: float = 1.5
    idle: float = 10.0
    all_ranks_here: bool = True
    joining: Joining | None = None
    life: Life = field(default_factory=Life)
    keeps: bool = False
    begins: bool = False
    ranks_each: int = 0
    terminal: tuple[BinaryIO, BinaryIO] | tuple[None, None] = (None, None)
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep
    calm_pause: Callable[[Sequence[Child], float], None] = until_one_ends
    children: list[Child] = field(default_factory=list)
    secret: str = field(default_factory=lambda: secrets.token_hex(SECRET_BYTES), repr=False)
    mends: Callable[[], bool] = lambda: False  # whether what failed is being mended; asked again and again
    kept: dict[str, int] = field(default_factory=dict)  # descriptors of what they leave, by the processes' names
    _not_now: bool = False  # a SIGTERM is only noted
    _terminated: bool = False
    _told_of_others: bool = False
    _killed: int = field(default_factory=killed_for_memory)  # for lack of memory, before this job
    _looked_at: float = 0.0
    _shown: dict[Path, ShownLog] = field(default_factory=dict)
    _lives: dict[str, int] = field(default_factory=dict)  # in which each process was started last

    def __enter__(self) -> Job:
        remove_folders_of_the_dead()
        if self.log_dir:
            try:
                self.log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as exc:
                raise UsageError(f"cannot write to --log-dir {self.log_dir}: {exc.strerror}") from exc
        self._guard = self.life.beside()
        self._logs = self.log_dir or self.scratch
        if isinstance(self._guard, KeptJob):
            self._take_over(self._guard)
            self._not_now = True  # whoever is not in yet would leave it to the next one
        self._previous = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        self._not_now = True  # a second signal must not leave anything behind
        self.life.ends()
        interrupted: list[int] = []
        here = threading.current_thread() is threading.main_thread()  # only there handlers can be set
        cut_off = any(child.log is None and child.code is None for child in self.children)
        before = signal.signal(signal.SIGINT, lambda number, _: interrupted.append(number)) if here else None
        try:
            self._end(self.children)
        finally:
            try:
                for log in self._shown.values():
                    log.close()
                if cut_off:
                    leave_the_terminal_in_order()
                for descriptor in self.kept.values():
                    os.close(descriptor)
                shutil.rmtree(self.scratch, ignore_errors=True)
                self._guard.dismiss()
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
    def was_adopted(self) -> bool:
        """Whether its processes were there before this launcher."""
        return isinstance(self._guard, KeptJob) and bool(self._guard.members)

    @property
    def scratch(self) -> Path:
        """A folder of this job's own, removed at its end."""
        return self._guard.folder

    @property
    def word_file(self) -> Path:
        """Where it tells processes that outlive another one how they go on."""
        return self.scratch / "word"

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
        """Run `python COMMAND...` as a child that dies with this process, or with the keeper (adoption.py).

        Args:
            name: as it appears in errors.
            log: file name in the log folder for its output.
            on_terminal: its output goes to this terminal, through its log where a log folder was asked for.
            through: a command that starts it, as `mpirun -n 4`.
            talk: its stdin and stdout are pipes to the caller; only stderr goes to the log.
        """
        self._not_now = True  # a SIGTERM must not lose sight of the child
        again, self._lives[name] = self._lives.get(name) == self.life.number, self.life.number
        path = None if on_terminal and self.log_dir is None else self._logs / log
        fault = "" if again else fault_for(name, self.life.number, os.environ.get(FAULT_VARIABLE, ""))
        try:
            output = None if path is None else open_private(path, further=self.life.number > 0 or again)
        except OSError as exc:
            raise not_written(self._logs / log, exc) from exc
        self._show(path, on_terminal=on_terminal)  # before it writes
        try:
            process: subprocess.Popen[bytes] = self._guard.start(
                name,
                [*through, sys.executable, *command],
                environment={
                    **self._environment(name, environment or {}, apart=path is None),
                    FAULT_HERE_VARIABLE: fault,
                },
                streams={
                    "stdin": subprocess.PIPE if talk else subprocess.DEVNULL,
                    "stdout": subprocess.PIPE if talk else output or self.terminal[0],
                    "stderr": output or self.terminal[1],
                },
                about={"log": log, "on_terminal": on_terminal},
            )
        finally:
            if output is not None:
                output.close()
        self._take(name, process, path)
        self._listen()
        return process

    def _listen(self) -> None:
        """Answer a SIGTERM from now on, and one that has come."""
        self._not_now = False
        if self._terminated:
            raise Terminated

    def _environment(self, name: str, given: Mapping[str, str], *, apart: bool) -> dict[str, str]:
        """What a process finds; `apart`: it leaves its last words to this one."""
        return {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **given,
            **(self._keeping(name) if self.keeps else {}),
            **environment_of(current()),
            PARENT_VARIABLE: str(self._guard.parent),
            RESTARTS_VARIABLE: str(self.life.number),
            JOB_SECRET_VARIABLE: self.secret if self.all_ranks_here else "",
            JOINED_VARIABLE: str(self._file("notes", name)),
            LAST_WORDS_VARIABLE: str(self._file("words", name)) if apart else "",
        }

    def _show(self, log: Path | None, *, on_terminal: bool) -> None:
        if on_terminal and log is not None and log not in self._shown:  # who takes another's place goes on in it
            self._shown[log] = ShownLog(log)

    def _take(self, name: str, process: Any, log: Path | None) -> None:
        """That process is one of this job's from now on."""
        self.children.append(
            Child(name, process, self._watch(process.pid), log, self._file("words", name), self._file("notes", name))
        )

    def _take_over(self, kept: KeptJob) -> None:
        """What there is of a job whose launcher has died."""
        self.kept = kept.open_held()
        for name, member in kept.members.items():
            about = member["about"]
            self._show(log := self._logs / about["log"], on_terminal=about["on_terminal"])
            self._take(name, kept.process(name), log)

    def _file(self, what: str, name: str) -> Path:
        return self.scratch / f"{what} of {name}"

    def _watch(self, leader: int) -> Session:
        """The session of a process that was started; whoever has to clear away knows of it from now on."""
        session = self._guard.watch(leader)
        note_session(self.scratch, session)
        return session

    def _keeping(self, name: str) -> dict[str, str]:
        if name not in self.kept:
            self.kept[name] = make_kept(begins=self.begins)
        words = {WORD_VARIABLE: str(self.word_file), COPIES_VARIABLE: str(self.ranks_each)}
        return words | {KEPT_VARIABLE: self._guard.hold(name, self.kept[name])}

    def wait(self) -> None:
        """Wait until every process has ended well, or every rank of a program that makes no group. A training has no
        time limit; its waits inside have.

        Raises:
            ProcessFailed: for the process that failed first and not only because another had.
            UsageError: servers or ranks wait for a rank that has ended without joining.
        """
        if isinstance(self._guard, KeptJob):
            self._guard.listen()
            self._listen()
        self.life.is_under_way()
        while True:
            ended_well, failed = self._all_ended_well(), any(child.code for child in self.children)
            mended = self.mends()  # after that look: who dies from then on is looked at next time
            if ended_well and not mended:  # while it is, the dead may already be gone, and others not yet there
                break
            if failed and not mended:
                self._let_the_others_notice()
                failure = self.failure()
                self.kill_the_frozen()
                raise failure
            self.life.look(self.children)
            if self.joining is not None:
                self.joining.look(self.children)
                if self.all_ranks_here and self.joining.needless(self.children):
                    break
            self._check_servers_were_used()
            if mended:
                self.pause(POLL_S)
            else:
                self.calm_pause(self.children, CALM_POLL_S)
        self._show_logs()
        if self.log_dir is not None:
            print(f"logs of {len(self.children)} processes: {self.log_dir}")

    def _check_servers_were_used(self) -> None:
        """A server ends with its trainers; one that outlives them all has never met them."""
        ranks = [child for child in self.children if not child.name.startswith("server")]
        ended = [rank.ended_at for rank in ranks if rank.ended_at is not None]
        if not ranks or len(ended) < len(ranks):
            return
        never = self.joining is not None and not any(rank.has_joined() for rank in ranks)
        if self.clock() - max(ended) > (0.0 if never else self.idle):
            if not self.all_ranks_here:  # those of other hosts end when they like
                if not self._told_of_others:
                    print("the ranks of this host have ended; its servers wait for those of others", file=sys.stderr)
                    self._told_of_others = True
                return
            raise UsageError(
                "all ranks have ended, but the servers still wait for them: "
                "the program never joined (does it call init_parallel_env() or fleet.init()?)"
            )

    def check(self) -> None:
        """Raise ProcessFailed if any process has failed by now."""
        self._mark_ended()
        if any(child.code for child in self.children):
            self._let_the_others_notice()
            raise self.failure()

    def failure(self) -> ProcessFailed:
        self._mark_ended()
        killed = killed_for_memory() - self._killed
        failure = failure_of(self.children, kept=self.log_dir is not None, killed=killed)
        if failure.exit_code == PeerError.exit_code or MISSING.search(failure.cause):  # of who has noticed
            failure.blame([child.name for child in self.children if child.code is None and child.is_frozen()])
        note = self.joining.note_on(failure.exit_code, self.children) if self.joining is not None else ""
        return failure.with_note(note) if note else failure

    def _all_ended_well(self) -> bool:
        self._mark_ended()
        return all(child.code == 0 for child in self.children)

    def _show_logs(self) -> None:
        for log in self._shown.values():
            log.show()

    def _mark_ended(self) -> None:
        self._show_logs()
        for child in self.children:
            if child.ended_at is None and child.code is not None:
                child.has_ended(self.clock())
                self._pass_on(child)
        if (now := self.clock()) > self._looked_at + LOOK_S:
            self._looked_at = now
            for child in self.children:
                child.look()
                self._pass_on(child)

    def _pass_on(self, child: Child) -> None:
        """What one whose output is not seen here has said for all who look."""
        if child.log is not None and child.log not in self._shown:
            for line in child.says():
                print(line, file=sys.stderr, flush=True)

    def _let_the_others_notice(self) -> None:
        begin = self.clock()
        while running := [c for c in self.children if c.code is None and c.waits_for() <= self.life.number]:
            unexplained = all(child.code == PeerError.exit_code for child in self.children if child.code)
            patience = CULPRIT_S if unexplained and not any(child.is_frozen() for child in running) else self.settle
            if self.clock() > begin + patience:
                return
            self.pause(POLL_S)
            self._mark_ended()

    def kill_the_frozen(self) -> None:
        """None of them may wake up and write what belongs to a group that is no more."""
        for child in self.children:
            if child.code is None and child.is_frozen():
                child.process.kill()
                child.process.wait()

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """End one child, and all that it has started, before the others."""
        self._end([child for child in self.children if child.process is process])
        self.children = [child for child in self.children if child.process is not process]

    def _end(self, children: Sequence[Child]) -> None:
        end_all(children, self.patience)


def leave_the_terminal_in_order() -> None:
    """After a process that was ended while it wrote there, be it within a progress bar, which hides the cursor."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            with suppress(OSError):  # the terminal is gone
                print(SHOW_CURSOR, file=stream, flush=True)
            return
