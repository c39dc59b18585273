"""`--adopt-for`: a job outlives its launcher for so many seconds, in which the same command takes it over.

The job is known by its folder of logs: the name of its keeper's socket (keeper.py) is made of that folder's number, in
Linux's abstract namespace, so that no file is left and none can be planted; both ends ask the kernel for the other's
user.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common.errors import UsageError
from common.launch.child import ProcessFailed
from common.launch.guard import ROOT
from common.system.handover import check_user
from common.system.leftovers import Session
from common.system.memory import Unreachable
from common.system.private_files import open_private
from common.system.sigterm import EndsHeldBack

__all__ = ["Adoption", "KeptJob", "adoption_of"]

START = "import sys; sys.path.append(sys.argv[1]); from common.launch.keeper import main; main()"
LOG = "keeperlog"
ANSWER_S = 30.0
GONE = -signal.SIGKILL  # how all end whose keeper is gone


class AdoptedConfig(Protocol):
    """A launcher's configuration."""

    @property
    def restarts(self) -> Any: ...
    @property
    def on(self) -> Any: ...
    @property
    def hosts(self) -> Any: ...
    @property
    def trace(self) -> Path | None: ...
    @property
    def log_dir(self) -> Path | None: ...


@dataclass(frozen=True)
class Adoption:
    """What `--adopt-for` asks for.

    Args:
        seconds: how long the job waits for a launcher.
        log_dir: by which the launcher knows it.
        command: of the launcher, which the next one must have too, and where it was given.
    """

    seconds: float
    log_dir: Path
    command: tuple[str, ...]

    def find(self) -> KeptJob | None:
        """The job that waits for a launcher; None: there is none. Whoever tells this one to end is answered from its
        `listen` on, where it ends the job in order.

        Raises:
            UsageError: another one watches it, or it is of another command.
        """
        held, job = EndsHeldBack(), None
        try:
            job = self._find()
        finally:
            if job is None:
                held.release()
        if job:
            job.held_back = held
        return job

    def _find(self) -> KeptJob | None:
        if not self.log_dir.is_dir():
            return None
        with suppress(ConnectionRefusedError):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(self._address())
                check_user(connection)
                return self._taken(connection)
            except (OSError, UsageError):
                connection.close()
                raise
            except Unreachable as exc:
                connection.close()
                raise UsageError(f"another user's process has the name of the job in {self.log_dir}: {exc}") from exc
        return None

    def _taken(self, connection: socket.socket) -> KeptJob | None:
        try:
            job = KeptJob(connection)
        except (EOFError, ConnectionResetError):  # it was ended meanwhile
            connection.close()
            return None
        if job.refused:
            raise UsageError(
                f"launcher {job.refused} watches the job in {self.log_dir}: end that first, or name another --log-dir"
            )
        if tuple(job.notes["command"]) != self.command:
            *command, folder = job.notes["command"]
            raise UsageError(
                f"the job in {self.log_dir} waits for the command that it was started with, {shlex.join(command)!r} in "
                f"{folder}: give that, or name another --log-dir"
            )
        job.ask("adopt", launcher=os.getpid())
        return job

    def begin(self, *, further: bool = False) -> KeptJob:
        """A new one, whose folder of logs is there; `further`: its keeper's log too, which goes on.

        Raises:
            UsageError: there is one already.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(self._address())
            except OSError as exc:
                raise UsageError(
                    f"another launcher has just begun a job in {self.log_dir}; name another --log-dir"
                ) from exc
            ours, theirs = socket.socketpair()
            with theirs, open_private(self.log_dir / LOG, further=further) as log:
                given = [str(ROOT), str(listener.fileno()), str(theirs.fileno()), str(os.getpid()), str(self.seconds)]
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", START, *given, tempfile.gettempdir()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=[listener.fileno(), theirs.fileno()],
                )
        return KeptJob(ours, process)

    def _address(self) -> str:
        found = self.log_dir.stat()
        return f"\0gradsync-keeper-{os.geteuid()}-{found.st_dev}-{found.st_ino}"


def adoption_of(config: AdoptedConfig, prog: str, command: Sequence[str]) -> Adoption | None:
    """What the flags of a launcher ask for.

    Raises:
        UsageError: they cannot work together; or another job, which can outlive its launcher, has that folder of logs.
    """
    seconds = config.restarts.adopt_for
    if not seconds:
        if config.log_dir is not None:
            Adoption(0.0, config.log_dir, ()).find()  # no such job waits for this command
        return None
    refused = {"engine": config.on.engine, "trace": config.trace}
    for flag, value in refused.items():
        if value is not None:
            raise UsageError(f"--{flag} does not go with --adopt-for, whose job outlives its launcher: leave one out")
    if config.hosts.count > 1:
        raise UsageError(f"--adopt-for is for one host so far (got {config.hosts.count}): leave it out")
    if config.log_dir is None:
        raise UsageError(
            "--adopt-for needs --log-dir, where processes write whoever watches, and by which they are found"
        )
    return Adoption(seconds, config.log_dir, (prog, *command, str(Path.cwd())))


class KeptJob:
    """The launcher's side of a job's keeper, in the place of a Guard.

    Args:
        process: of the keeper, where this launcher has started it.

    Raises:
        EOFError: the keeper has just ended.
    """

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._connection, self._process = connection, process
        self.held_back: EndsHeldBack | None = None
        connection.settimeout(ANSWER_S)
        found = self._heard()
        self.refused: int = found.get("refused", 0)  # the launcher that has it
        if self.refused:
            return
        self.parent: int = found["keeper"]
        self._end = os.pidfd_open(self.parent)
        self.folder = Path(found["folder"])
        self.members: dict[str, Any] = found["members"]
        self._sessions: dict[int, int | None] = {one["pid"]: one["started"] for one in self.members.values()}
        self.held: dict[str, int] = found["held"]
        self.notes: Any = found["notes"]
        self.launcher: int = found["launcher"]  # the last one
        self.died_at: float | None = found["died_at"]

    def listen(self) -> None:
        """Whoever has told this launcher to end since it found the job is answered now."""
        if self.held_back:
            self.held_back.release()
            self.held_back = None

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        streams: Mapping[str, Any],
        about: Any,
    ) -> Any:
        """Start a KeptProcess in a session of its own.

        Args:
            streams: as Popen takes them; it writes to its log, there as `stderr`, and reads nothing.
            about: what the next launcher has to know of it.

        Raises:
            OSError: it cannot be started.
            ProcessFailed: the keeper is gone, or does not answer.
        """
        words = {"name": name, "command": list(command), "environment": dict(environment), "about": about}
        found = self.ask("start", streams["stderr"].fileno(), **words)
        if "errno" in found:
            raise OSError(found["errno"], found["strerror"])
        self._sessions[found["pid"]] = found["started"]
        return KeptProcess(self, found["pid"])

    def process(self, name: str) -> KeptProcess:
        """Of a member that there was when this launcher came."""
        return KeptProcess(self, self.members[name]["pid"], self.members[name]["code"])

    def watch(self, leader: int) -> Session:
        """The keeper does, since it has started that process."""
        return Session(leader, self._sessions[leader])

    def hold(self, name: str, descriptor: int) -> str:
        """Have the keeper hold this too; the path by which processes of this user open it."""
        if name not in self.held:
            self.held[name] = self.ask("hold", descriptor, name=name)["descriptor"]
        return self._path(name)

    def open_held(self) -> dict[str, int]:
        """Descriptors, for this process, of all that the keeper holds."""
        return {name: os.open(self._path(name), os.O_RDWR | os.O_CLOEXEC) for name in self.held}

    def _path(self, name: str) -> str:
        return f"/proc/{self.parent}/fd/{self.held[name]}"

    def note(self, notes: Any) -> None:
        """For the next launcher; None: if this one dies now, all ends with it."""
        with suppress(ProcessFailed):  # what is to be told is told by whoever waits for processes
            self.ask("note", notes=notes)

    def code(self, pid: int) -> int:
        """How this process has ended, which it has."""
        try:
            return int(self.ask("code", pid=pid)["code"])
        except ProcessFailed:
            return GONE

    def ask(self, do: str, *given: int, **words: Any) -> Any:
        """
        Raises:
            ProcessFailed: the keeper is gone, or does not answer.
        """
        message = json.dumps({"do": do, **words}).encode() + b"\n"
        held = EndsHeldBack()  # else the next one who asks would hear the answer to this
        try:
            sent = socket.send_fds(self._connection, [message], given)
            self._connection.sendall(message[sent:])
            return self._heard()
        except (OSError, EOFError) as exc:
            why = "does not answer" if isinstance(exc, TimeoutError) else "has died, and all processes with it"
            raise ProcessFailed(f"the job's keeper (process {self.parent}) {why}", 1, joined=True) from exc
        finally:
            held.release()

    def dismiss(self) -> None:
        """The launcher has cleared away by itself."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._end, signal.SIGKILL)
        is_over(self._end, ANSWER_S)
        if self._process:
            self._process.wait()
        os.close(self._end)
        self._connection.close()

    def _heard(self) -> Any:
        told = b""
        while not told.endswith(b"\n"):
            more = self._connection.recv(1 << 16)
            if not more:
                raise EOFError
            told += more
        return json.loads(told)


class KeptProcess:
    """What a launcher needs of `subprocess.Popen`, of a process that the keeper has started.

    Args:
        code: how it has ended; None: its number is its own until the keeper is asked how it has.
    """

    stdin = stdout = None

    def __init__(self, job: KeptJob, pid: int, code: int | None = None) -> None:
        self.pid, self.returncode, self._job = pid, code, job
        if code is None:
            try:
                self._end = os.pidfd_open(pid)
            except ProcessLookupError:  # the keeper is gone too
                self.returncode = GONE

    def poll(self) -> int | None:
        if self.returncode is None and is_over(self._end, 0.0):
            self.returncode = self._job.code(self.pid)
            os.close(self._end)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not is_over(self._end, timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.poll() or 0

    def kill(self) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._end, signal.SIGKILL)


def is_over(process: int, seconds: float | None) -> bool:
    """Whether the process of this descriptor ends within so many seconds."""
    looked_at = select.poll()
    looked_at.register(process, select.POLLIN)
    return bool(looked_at.poll(None if seconds is None else 1000 * seconds))
