"""A program of the user's own, run once under a contestant, and why it failed."""

from __future__ import annotations

import re
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.contestants.table_of_trainings import OTHER_ORDER, Contestant
from benchmarks.records.script import ProgramRecord
from common.errors import CertificateFailed, GradSyncError, UsageError
from common.launch.job import Job
from common.system.mkl import CPU_TYPE, MKL_CHOOSES

__all__ = ["ProgramFailed", "check_program", "output_of", "reason_in", "run_once"]

SURFACES = {
    "ring": "collective",
    OTHER_ORDER: "collective=benchmarks.training.other_order",
}  # others are called as they are
WORKER = Path(__file__).with_name("script_worker.py")
EXCEPTION = re.compile(
    r"(\S+: )?([\w.]*(Error|Exception|Lost|Stalled|Mismatch|Failed|Unreachable|InUse|SystemExit)\b)(:|$)"
    r"|\S+: error: |Fatal Python error"  # argparse's, and of a crash
)
TRACEBACK = "Traceback (most recent call last):"
NO_MODEL = (
    "the program ended well, but gave no model to paddle.DataParallel or fleet.distributed_model, so there is "
    "nothing to compare; wrap the model that it trains in one of them"
)
PEER_ERROR = re.compile(r"\b(PeerLost|PeerStalled|PeerError)\b")  # the fault is elsewhere


class ProgramFailed(GradSyncError):
    """The program failed under a contestant; the message is one line, `output` the ends of the ranks' logs."""

    def __init__(self, message: str, output: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.output = list(output)


def check_program(script: Path) -> None:
    """Find out before anything is started whether there is a program that Python can read.

    Raises:
        UsageError: there is not; of a syntax error it shows the line.
    """
    try:
        source = script.read_bytes()
    except OSError as exc:
        missing = isinstance(exc, FileNotFoundError)
        raise UsageError(
            f"no such script: {script}" if missing else f"cannot read {script}: {exc.strerror or exc}"
        ) from exc
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the program's own runs show them
            compile(source, str(script), "exec", dont_inherit=True)
    except SyntaxError as exc:
        line = (exc.text or "").strip()
        raise UsageError(f"{script}, line {exc.lineno}: {exc.msg}" + (f": {line}" if line else "")) from exc
    except ValueError as exc:  # of a null byte, before Python 3.12
        raise UsageError(f"{script}: {exc}") from exc


def run_once(
    contestant: Contestant,
    script: Sequence[str],
    folder: Path,
    *,
    warmup_steps: int,
    timeout: float,
    run_timeout: float,
) -> ProgramRecord:
    """One whole run of the program; returns rank 0's step times and the digest, the same on all ranks.

    Raises:
        ProgramFailed: it did not end well on every rank.
        CertificateFailed: the ranks ended with different parameters.
    """
    record = folder / contestant.stem
    worker = [str(WORKER), SURFACES.get(contestant.scheme, contestant.scheme), str(record), *script]
    log = folder / "log"
    shutil.rmtree(log, ignore_errors=True)  # another contestant's words explain nothing
    with Job(log) as job:
        kernels = {CPU_TYPE: MKL_CHOOSES} if contestant.mkl_chooses else {}
        command = [*launcher(contestant, timeout, log), *worker]
        process = job.start(contestant.name, command, log="launcher.log", environment=kernels)
        try:
            process.wait(run_timeout)
        except subprocess.TimeoutExpired as exc:
            raise ProgramFailed(f"the program ran longer than {run_timeout:g} s (--run-timeout)", tails(log)) from exc
        files = [record.with_suffix(f".{r}.json") for r in range(contestant.nranks)]
        missing = [str(rank) for rank, file in enumerate(files) if not file.exists()]
        ranks = [msgspec.json.decode(file.read_bytes(), type=ProgramRecord) for file in files if file.exists()]
        for file in files:
            file.unlink(missing_ok=True)  # the next repetition writes its own
        if not missing and not all(each.models for each in ranks):  # whatever the launcher makes of it
            raise ProgramFailed(NO_MODEL)
        if process.returncode:
            raise ProgramFailed(f"exit code {process.returncode}{reason_in(log)}", tails(log))
    if missing:
        raise ProgramFailed(f"the program ended early on rank {', '.join(missing)}, without an error", tails(log))
    if (made := len(ranks[0].times)) < warmup_steps + 2:
        raise ProgramFailed(f"{made} backwards leave no step to time after --warmup-steps {warmup_steps}")
    if len({each.parameters_sha256 for each in ranks}) > 1:
        raise CertificateFailed("ranks ended with different parameters")
    return ranks[0]


def launcher(contestant: Contestant, seconds: float, log: Path) -> list[str]:
    nranks, timeout = str(contestant.nranks), str(seconds)
    if contestant.scheme == "ps":
        flags = ["--nranks", nranks, "--servers", str(contestant.servers), "--timeout", timeout, "--log-dir", str(log)]
        return ["-m", "ps.run", "--no-install", "--data-plane", contestant.backend, *flags]
    if contestant.scheme in ("ring", OTHER_ORDER):
        flags = ["--nranks", nranks, "--backend", contestant.backend, "--timeout", timeout, "--log-dir", str(log)]
        return ["-m", "collective.run", "--no-install", *flags]
    flags = ["--nproc_per_node", nranks, "--backend", "gloo", "--log_dir", str(log)]
    return ["-m", "paddle.distributed.launch", *flags]


def tails(log: Path) -> list[str]:
    """The last lines of every process, once for those that end alike, without what a launcher repeats of a rank."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for path in logs(log):
        own = [line for line in lines_of(path) if not line.startswith("|")]
        alike.setdefault(tuple(own[-3:]), []).append(path.name)
    return [f"{', '.join(names)}: {line}" for lines, names in alike.items() for line in lines]


def reason_in(log: Path, file: str = "script.json") -> str:
    """What to say after the exit code: the line that says best why a run failed. It names an exception, of the process
    that fell silent first; one that blames another process only if there is no other. The last line of a program that
    names none is what it happened to print, and no reason: `file` has it."""
    found = [line for path in logs(log) for line in reversed(errors_in(path))]
    found.sort(key=lambda line: bool(PEER_ERROR.search(line)))
    if found:
        return ": " + found[0].removeprefix("SystemExit: ")
    if any(map(lines_of, logs(log))):
        return f", without naming an error; its last lines are in {file}"
    return ", without a word"


def errors_in(path: Path) -> list[str]:
    """The lines that name an exception, be it by its place at the end of a traceback."""
    found, within = [], False
    for line in path.read_text(errors="replace").splitlines():
        ends = within and line[:1].strip() != ""
        if ends or EXCEPTION.match(line.strip()):
            found.append(line.strip())
        within = line == TRACEBACK or (within and not ends)
    return found


def logs(folder: Path) -> list[Path]:
    """Of the ranks first, then of servers, then of the launcher; each in the order in which they fell silent."""
    kinds = ("workerlog", "serverlog", "launcher")
    return [path for kind in kinds for path in sorted(folder.glob(f"{kind}*"), key=lambda p: p.stat().st_mtime_ns)]


def lines_of(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]


def output_of(failure: GradSyncError) -> list[str]:
    return failure.output if isinstance(failure, ProgramFailed) else []
