"""A process that a launcher has started: how it ends, and what is told of it when it fails."""

from __future__ import annotations

import math
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from common.errors import GradSyncError, PeerError, UsageError
from common.system.atomic_file import why_not_writable
from common.system.leftovers import Session, clear_away, members_of
from common.system.next_epoch import GOES_ON, WAITS
from common.system.out_of_memory import hint_of_memory
from common.system.process import COMPLETE, DONE, SAYS, STARTED

__all__ = ["MISSING", "Child", "ProcessFailed", "end_all", "failure_of", "until_one_ends"]

TAIL_LINES = 12
WITHOUT_S = 0.02  # between two looks at who has ended, where nothing tells
# words of those that another one has failed, though the exit code is not of that
MISSING = re.compile(
    r"\bRendezvousError: (\d+ of \d+ ranks joined within|rank [\d, ]+ did not connect to rank) "
    r"|\b(RendezvousError: rank \d+ at|PeerUnreachable: .*: its data port) \S+ (did not let|was not reached within) "
    r"|\bPeerUnreachable: nobody answered at "
)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessFailed(GradSyncError):
    """A process of the job failed; the message holds its name, how it ended and the tail of its log.

    Args:
        words: what it said itself, if it has no log: to be shown instead of the message.
        cause: who failed and why, in a line.
        since: when it was seen to have ended, monotonic seconds.
        joined: whether it had begun to join its group; of a server, whether somebody had.
        by_signal: whether a signal killed it.

    Attributes:
        is_of_frozen: it has only missed one that is frozen.
    """

    is_of_frozen = False

    def __init__(
        self,
        message: str,
        exit_code: int,
        *,
        words: str = "",
        cause: str = "",
        since: float | None = None,
        joined: bool = False,
        by_signal: bool = False,
    ) -> None:
        super().__init__(message)
        self.exit_code, self.words, self.cause = exit_code, words, cause or message.partition("\n")[0]
        self.since, self.joined, self.by_signal = since, joined, by_signal

    def with_note(self, note: str) -> ProcessFailed:
        """The same, with a line at its end."""
        self.args = (f"{self}\n{note}",)
        self.words = self.words and f"{self.words}\n{note}"
        return self

    def blame(self, frozen: Sequence[str]) -> None:
        """Name those that are frozen, if there are any: they are what is wrong with who has failed."""
        if frozen:
            who = f"{' and '.join(frozen)} {'are' if frozen[1:] else 'is'} frozen (stopped, or in a debugger)"
            self.args, self.cause, self.is_of_frozen = (f"{who}; {self}",), f"{who}; {self.cause}", True

    @property
    def whole(self) -> str:
        """All that is known."""
        return f"{self}\n{self.words}".rstrip()


@dataclass
class Child:
    name: str  # "rank 2", "server 0"
    process: subprocess.Popen[bytes]
    session: Session  # it and all that it has started
    log: Path | None  # None: it writes to this terminal
    words: Path  # its last ones, in that case
    joined: Path  # there from when it joins a group; how many ranks that has
    ended_at: float | None = None
    outlived_by: set[int] = field(default_factory=set)  # process ids of what it had started and was there then
    peak_bytes: int = 0  # of its memory, as far as was seen
    _told: int = 0  # how many of the lines that it has for the terminal were asked for

    @property
    def code(self) -> int | None:
        """How it has ended; 0 also if a signal killed it when it had done all."""
        code: int | None = self.process.poll()
        return 0 if code is not None and code < 0 and DONE in self.told.splitlines() else code

    @property
    def told(self) -> str:
        """What it has noted for its launcher."""
        return self.joined.read_text() if self.joined.exists() else ""

    def has_joined(self, nranks: int | None = None) -> bool:
        """Whether it has begun to join a group; of so many ranks, if that is said."""
        lines = [line for line in self.told.splitlines() if not line.startswith(STARTED)]
        return bool(lines) if nranks is None else str(nranks) in lines

    def is_in_group(self) -> bool:
        """Whether the group that it joined was complete, as one of a single rank always is."""
        return bool({COMPLETE, "1"} & {*self.told.splitlines()})

    def has_ended(self, now: float) -> None:
        """It was seen to: what it had started may end soon, too, and who that was can't be asked any more."""
        self.ended_at = now
        self.outlived_by = members_of([self.session])

    def started(self) -> set[int]:
        """Process ids of those that have ended with it, as far as it or its end has told."""
        return self.outlived_by | {int(number) for line in self._notes(STARTED) for number in line.split()[1:]}

    def waits_for(self) -> int:
        """The epoch that it can go on in, as soon as its launcher lets it; -1: none."""
        notes = self._notes(WAITS)
        return int(notes[-1].split()[1]) if notes else -1

    def why_it_waits(self) -> str:
        """In its words."""
        return self._notes(WAITS)[-1].split(" ", 2)[2]

    def went_on(self, epoch: int) -> tuple[int, int] | None:
        """(after which step it goes on in that epoch, how many it had made before); None: it does not yet."""
        for line in self._notes(GOES_ON):
            its_epoch, step, made = map(int, line.removeprefix(GOES_ON).split())
            if its_epoch == epoch:
                return step, made
        return None

    def says(self) -> list[str]:
        """What it has for the terminal, each line once."""
        lines = self._notes(SAYS)
        new, self._told = lines[self._told :], len(lines)
        return [line.removeprefix(SAYS).strip() for line in new]

    def _notes(self, beginning: str) -> list[str]:
        """Whole lines that it has left."""
        return [line for line in self.told.split("\n")[:-1] if line.startswith(beginning)]

    def look(self) -> None:
        """See how much memory it has; whoever is killed can't be asked any more."""
        with suppress(OSError, ValueError, IndexError):
            resident = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
            self.peak_bytes = max(self.peak_bytes, resident * PAGE_BYTES)

    def how_it_ended(self, killed: int) -> str:
        """In words; `killed` as of `failure_of`."""
        code = self.code or 0
        if code >= 0:
            return f"ended with exit code {code}"
        hint = hint_of_memory(killed, self.peak_bytes) if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"

    def last_words(self) -> str:
        """What it has left, if it has no log."""
        return self.words.read_text().strip() if self.words.exists() else ""

    def last_lines(self) -> list[str]:
        """That it has written."""
        return last_lines(self.log) if self.log is not None else self.last_words().splitlines()

    def is_frozen(self) -> bool:
        """Whether it was stopped by SIGSTOP or the like, so that it will not end by itself."""
        try:
            return psutil.Process(self.process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.NoSuchProcess:
            return False


def failure_of(children: Sequence[Child], *, kept: bool, killed: int = 0) -> ProcessFailed:
    """What to tell of those that have failed: the one that did so first, and not only because another had.

    Args:
        kept: whether their logs are.
        killed: how many processes the kernel has killed meanwhile for lack of memory, here and in our container.
    """
    first, *_ = sorted((child for child in children if child.code), key=_blame)
    code = first.code or 0
    message = f"{first.name} {first.how_it_ended(killed)}"
    lines = first.last_lines()
    cause = f"{message}: {lines[-1]}" if lines and code > 0 else message
    if first.log is not None:
        message += _tail(first.log, lines, kept=kept)
    return ProcessFailed(
        message,
        128 - code if code < 0 else code,
        words=first.last_words(),
        cause=cause,
        since=first.ended_at,
        joined=any(each.has_joined() for each in (children if first.name.startswith("server") else [first])),
        by_signal=code < 0,
    )


def end_all(children: Sequence[Child], patience: float) -> None:
    """End them and all that they have started, SIGTERM and after so many seconds SIGKILL, and remove what Paddle has
    left of them in shared memory."""
    sessions = [child.session for child in children]
    members = members_of(sessions).union(*(child.started() for child in children))
    running = [child.process for child in children if child.process.poll() is None]
    for process in running:
        _signal_group(process, signal.SIGTERM)
        _signal_group(process, signal.SIGCONT)  # a frozen one must hear it
    deadline = time.monotonic() + patience
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    clear_away(sessions, also=members)
    for child in children:
        for pipe in (child.process.stdin, child.process.stdout):
            if pipe:
                with suppress(BrokenPipeError):
                    pipe.close()


def until_one_ends(children: Sequence[Child], seconds: float) -> None:
    """Wait until one of those that run ends, for so many seconds at most."""
    looked_at = select.poll()
    with ExitStack() as stack:
        for child in children:
            if child.process.returncode is None:
                try:
                    end = os.pidfd_open(child.process.pid)
                except OSError:  # it has ended and is another's child; or this kernel has no such thing
                    time.sleep(min(seconds, WITHOUT_S))
                    return
                stack.callback(os.close, end)
                looked_at.register(end, select.POLLIN)
        looked_at.poll(1000 * seconds)


def _signal_group(leader: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To a child and all that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, number)


def _blame(child: Child) -> tuple[bool, bool, bool, float]:
    """Processes that only report another's failure come last; among the rest, the first to end, but a server that has
    refused what a rank does after that rank, and who has missed another after all that did not: a killed process may
    be seen to have ended after those that have noticed. Who was not seen to end yet did so after those who were."""
    lost = child.code == PeerError.exit_code
    refused = child.name.startswith("server") and (lost or child.code == UsageError.exit_code)
    missed = any(map(MISSING.search, child.last_lines()[-1:]))
    return (lost, refused, missed, child.ended_at or math.inf)


def last_lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").strip().splitlines()[-TAIL_LINES:]


def _tail(log: Path, lines: Sequence[str], *, kept: bool) -> str:
    where = f" of {log}" if kept else " of its output"
    tail = "".join(f"\n  | {line}" for line in [f"(last lines{where})", *lines]) if lines else " without a word"
    why = why_not_writable(log.parent)
    return tail + (f"\nwhat it wrote last is lost: {log} takes no more ({why}); free some space there" if why else "")
