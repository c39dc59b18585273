"""Where the cores' time goes while a backend runs: all processes and the kernel, sampled by Linux's perf."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.flags.sweep import size_in_words
from benchmarks.page.markdown import row, table
from benchmarks.records.environment import machine_of
from common.errors import GradSyncError
from common.launch.launch import FOLDER

__all__ = ["CoreTime", "PerfFailed", "Sample", "core_time", "sampled", "to_markdown", "why_no_perf"]

FREQUENCY = 499  # samples a second and core; odd, so as not to keep step with timers
ANSWER_S = 10.0  # for perf to begin or to end sampling
WRITE_S = 120.0  # for perf to write what it has
REPORT_S = 300.0  # for perf to find all names
MOST_SYMBOLS, LEAST_SHARE = 8, 0.01  # that are told of each backend
KERNEL, NAMELESS, IDLE, OTHER = "kernel", "(no name)", "idle", "other"
PLACES = (  # the first whose patterns for process, file and function fit is where a sample belongs
    (IDLE, "^swapper", "^kernel$", r"idle|halt|mwait"),
    ("kernel: copies", "", "^kernel$", r"copy|csum|rep_movs|memcpy|memset|clear_page"),
    ("kernel: the rest", "", "^kernel$", ""),
    ("Python", "", r"python3", ""),
    ("NumPy", "", r"_umath|_simd", ""),
    ("libc", "", r"^libc[.-]", ""),
    ("gRPC", "", "cygrpc", ""),
    ("Paddle", "", r"libpaddle|libphi|libopenblas|libblas|mkl|libdnnl", ""),
)
HEADS = (*(place for place, *_ in PLACES), OTHER)


class PerfFailed(GradSyncError):
    """What runs is not to blame."""


@dataclass(frozen=True)
class Sample:
    """What a core was seen to do, and how often; `file` is "kernel" for all of the kernel."""

    count: int
    process: str
    file: str
    function: str


@dataclass(frozen=True)
class CoreTime:
    """What all cores did while a backend ran.

    Args:
        nbytes: of the array on each rank.
        seconds: of a call, the median.
        places: samples by place, of HEADS.
        symbols: samples by (function, file), of all that were not idle.
    """

    backend: str
    nranks: int
    nbytes: int
    seconds: float
    places: Counter[str]
    symbols: Counter[tuple[str, str]]

    @property
    def samples(self) -> int:
        return sum(self.places.values())


def why_no_perf() -> tuple[str, str]:
    """Why the cores cannot be sampled here, and what mends it if that is known; "" if they can."""
    if shutil.which("perf") is None:
        return "perf is not installed", "apt-get install linux-perf"
    root = "" if os.geteuid() == 0 else "be root"
    try:
        with Path("/proc/kallsyms").open() as names:
            hidden = set(names.read(8)) == {"0"}
        if hidden:
            return "the kernel hides its functions' names", root or "sysctl kernel.kptr_restrict=0"
        with sampled():
            pass
    except (OSError, PerfFailed) as exc:
        return str(exc), root
    return "", ""


@contextmanager
def sampled() -> Iterator[list[Sample]]:
    """Every core is sampled while this is entered; the list is filled when it is left.

    Raises:
        PerfFailed: perf may not, or does not answer in time.
    """
    found: list[Sample] = []
    with TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-") as folder:
        file, words = Path(folder, "perf.data"), Path(folder, "words")
        with recording(file, words):
            yield found
        found += samples_of(file)


@contextmanager
def recording(file: Path, words: Path) -> Iterator[None]:
    """perf takes its orders and answers through pipes. It ends with its workload, a `cat` of nothing, and that one with
    this process, whatever ends it."""
    with ExitStack() as stack:

        def pipe() -> tuple[FileIO, FileIO]:
            outlet, inlet = os.pipe()
            return stack.enter_context(FileIO(outlet)), stack.enter_context(FileIO(inlet, "w"))

        (orders, tell), (hear, answers), (workload, alive) = pipe(), pipe(), pipe()
        command = ["perf", "record", "--all-cpus", "--event", "cpu-clock", "--freq", str(FREQUENCY), "--delay", "-1"]
        command += [
            "--control",
            f"fd:{orders.fileno()},{answers.fileno()}",
            "--no-buildid",
            "--no-buildid-cache",
            "--output",
            str(file),
        ]
        try:
            perf = subprocess.Popen(
                [*command, "--", "cat"],
                stdin=workload,
                stdout=subprocess.DEVNULL,
                stderr=stack.enter_context(words.open("w")),
                pass_fds=(orders.fileno(), answers.fileno()),
                start_new_session=True,
            )
        except OSError as exc:
            raise PerfFailed(f"perf cannot be started: {exc.strerror}") from exc
        stack.callback(kill, perf)
        for theirs in (orders, answers, workload):
            theirs.close()

        def order(what: str) -> None:
            with suppress(BrokenPipeError):
                tell.write(f"{what}\n".encode())
            if not select.select([hear], [], [], ANSWER_S)[0]:
                raise PerfFailed(f"perf did not answer to {what!r} within {ANSWER_S:g} s")
            if not hear.read(64):
                raise PerfFailed(f"perf cannot sample the cores: {in_one_line(words.read_text(errors='replace'))}")

        order("enable")
        yield
        order("disable")
        alive.close()
        try:
            perf.wait(WRITE_S)
        except subprocess.TimeoutExpired as exc:
            raise PerfFailed(f"perf did not end within {WRITE_S:g} s") from exc


def kill(perf: subprocess.Popen[bytes]) -> None:
    """It and its workload."""
    with suppress(ProcessLookupError):
        os.killpg(perf.pid, signal.SIGKILL)
    perf.wait()


def in_one_line(text: str) -> str:
    return " ".join(text.split())[:300] or "without a word"


def samples_of(file: Path) -> list[Sample]:
    """Everything that was seen."""
    command = ["perf", "report", "--stdio", "--no-children", "--fields", "sample,comm,dso,sym"]
    command += ["--field-separator", ";", "--input", str(file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=REPORT_S, check=False)
    except subprocess.TimeoutExpired as exc:
        raise PerfFailed(f"perf report did not end within {REPORT_S:g} s") from exc
    if done.returncode:
        raise PerfFailed(f"perf report failed: {in_one_line(done.stderr)}")
    return list(parse(done.stdout))


def parse(text: str) -> Iterator[Sample]:
    for line in text.splitlines():
        fields = [each.strip() for each in line.split(";", 3)]
        if len(fields) == 4 and fields[0].isdigit():
            count, process, file, symbol = fields
            level, function = symbol[:3], symbol[3:].strip()
            if re.fullmatch(r"(0x)?[0-9a-f]{6,}", function):
                function = NAMELESS
            yield Sample(int(count), process, KERNEL if level == "[k]" else file, function)


def core_time(backend: str, nranks: int, nbytes: int, seconds: float, samples: Iterable[Sample]) -> CoreTime:
    places: Counter[str] = Counter()
    symbols: Counter[tuple[str, str]] = Counter()
    for each in samples:
        place = place_of(each.process, each.file, each.function)
        places[place] += each.count
        if place != IDLE:
            symbols[each.function, each.file] += each.count
    return CoreTime(backend, nranks, nbytes, seconds, places, symbols)


def place_of(process: str, file: str, function: str) -> str:
    """
    >>> place_of("swapper", "kernel", "default_idle"), place_of("python", "libc.so.6", "__memmove_avx")
    ('idle', 'libc')
    """
    for place, processes, files, functions in PLACES:
        if re.search(processes, process) and re.search(files, file) and re.search(functions, function):
            return place
    return OTHER


def to_markdown(found: Sequence[CoreTime], results: Mapping[str, Any]) -> str:
    """A table of places, then for each backend the functions that took most.

    Args:
        results: the sweep's, of which the head is told.
    """
    environment = results["environment"]
    where = f"{machine_of(environment)}, kernel {environment['kernel']}"
    head = ("N", "bytes", "backend", "ms a call", "samples", *HEADS)
    rows, most = [], []
    for each in found:
        name = (str(each.nranks), size_in_words(each.nbytes), each.backend)
        total = max(1, each.samples)
        shares = [f"{each.places[place] / total:.0%}" if each.places[place] else "" for place in HEADS]
        rows.append(row((*name, f"{1e3 * each.seconds:.3g}", f"{each.samples:,}", *shares)))
        told = [
            f"{count / total:.1%} {function} ({file})"
            for (function, file), count in each.symbols.most_common(MOST_SYMBOLS)
            if count >= LEAST_SHARE * total
        ]
        most.append(row((*name, "; ".join(told))))
    return f"""# Where the cores' time goes

`{results["command"]}`, commit {environment["commit"] or "unknown"}, {results["created"]}, on {where}.

Shares of the time of all cores, from {FREQUENCY} samples a second and core (perf, cpu-clock), while one backend ran
alone. Kernel: copies are those between processes, sockets and pages, and pages being zeroed; the rest is
scheduling, wake-ups, sockets and system calls. NumPy: additions, multiplications and what leads to them. libc: mostly
copies in user memory. Functions without a name are in files without symbols. Python's part holds the measuring itself:
reading clocks, and telling each call's time. Being sampled slows programs a little.

{table(head, rows, numeric=True)}

## What took most

{table(("N", "bytes", "backend", "functions"), most)}
"""
