"""`compare --preset` and `compare --config`: the parts of a job in turn, a round each, and one report of them all."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import select
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.text import Text

from benchmarks.cluster import why_no_cluster
from benchmarks.environment import cpu_name, describe_environment
from benchmarks.job import JobFile, Part, config_of, preset, presets, read_job
from benchmarks.kinds import RESULT_FILES
from benchmarks.language import LANGUAGES, speaking
from benchmarks.overall_progress import OverallProgress
from benchmarks.progress import PROGRESS_VARIABLE, told_by
from benchmarks.result_files import kind_of
from benchmarks.rounds import ROUNDS_FILE, TURN, TURNS_VARIABLE
from benchmarks.stand_in import write_idx_files
from benchmarks.suite_report import print_summary, to_html, to_markdown
from common.entry import check_writable
from common.errors import CertificateFailed, GradSyncError, UsageError, choose
from common.launch import Job
from common.memory import memory_bytes

__all__ = ["SuiteConfig", "run_suite"]

SCHEMA = 1
POLL_S = 0.2
ROOM = 0.5  # of the memory, that another part finds free where it begins while others wait
NEARLY = 0.99  # the most that a part that has not ended is told to have done
TOLD = "progress"  # the file in which a part tells how far it is
PATIENCE_S = 15.0  # a command that is told to end ends its own processes first
PACKAGES = ("benchmarks", "collective", "common", "ps")


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """Run all parts of a job, a preset or a TOML file, in turn, a round each, and write one report of them."""

    preset: str | None = None
    """quick (some minutes), full (less than an hour) or accuracy."""
    config: Path | None = None
    """A job of your own, as docs/methodology.md describes it, instead of a preset."""
    data_dir: Path | None = None
    """Folder that holds a folder mnist and a folder fashion-mnist, each with the data set's four IDX .gz files.
    (default: synthetic data stand in for them)"""
    resume: bool = False
    """Keep the parts, and the rounds of parts, that --out holds from the same command, sources and machine."""
    out: Path = Path("out/suite")
    """Folder for suite.json, suite.md and suite.html, and a folder for each part."""
    lang: str = "en"
    """Language of the reports: en or zh."""

    def __post_init__(self) -> None:
        choose("language", self.lang, LANGUAGES)
        if (self.preset is None) == (self.config is None):
            raise UsageError(f"give --preset ({', '.join(presets())}) or --config FILE.toml, one of them")

    def job(self) -> JobFile:
        """Its parts, checked."""
        file = preset(self.preset) if self.preset is not None else self.config
        assert file is not None
        return read_job(file, self.data_dir, lambda name: write_idx_files(self.out.resolve() / "data" / name))


@dataclass
class Outcome:
    """What has become of a part.

    Args:
        status: "missing" until it has ended; then "done", "failed", "wrong" (its certificate failed), or "absent" if
            this machine cannot run it; "incomplete" if the job ended before all of its rounds were made.
        results: what its JSON holds, if it wrote one; of a wrong part only what has no speed.
        resumed: whether its folder holds rounds to go on from.
    """

    part: Part
    command: str
    status: str = "missing"
    reason: str = "not run"
    seconds: float = 0.0
    results: dict[str, Any] | None = None
    resumed: bool = False

    def to_json(self) -> dict[str, Any]:
        kept = ("command", "status", "reason", "seconds", "results")
        return {"name": self.part.name, "title": self.part.title, **{key: getattr(self, key) for key in kept}}


def run_suite(config: SuiteConfig) -> None:
    """Run the parts; whatever ends this, the report says what has been measured and what is missing.

    Raises:
        CertificateFailed: in some part, whose speed is then not shown.
        GradSyncError: a part failed.
        UsageError: nothing of what there is can be resumed; it is left as it is.
    """
    check_writable("out", config.out / "suite.json")
    job = config.job()
    console = Console(highlight=False)
    outcomes = [Outcome(p, shlex.join(["python", "-m", "benchmarks", *command_of(p, config)])) for p in job.parts]
    suite = {
        "schema": SCHEMA,
        "kind": "suite",
        "title": job.title,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "synthetic": job.synthetic,
        "environment": describe_environment(),
    }
    prints = {each.part.name: fingerprint(each.part) for each in outcomes}
    if config.resume:
        resume(outcomes, prints, config)
    try:
        run_parts(outcomes, prints, suite, config, console)
    finally:
        write_report(suite, outcomes, config)
        print_summary({**suite, "parts": [each.to_json() for each in outcomes]}, console)
        console.print(f"\nreport: {config.out / 'suite.html'}", soft_wrap=True)
    for status, error, what in (
        ("wrong", CertificateFailed, "computed the wrong thing"),
        ("failed", GradSyncError, "failed"),
    ):
        if names := [each.part.name for each in outcomes if each.status == status]:
            raise error(f"{', '.join(names)} {what}; see {config.out / 'suite.md'}")


def resume(outcomes: list[Outcome], prints: dict[str, str], config: SuiteConfig) -> None:
    """Take up what can be.

    Raises:
        UsageError: there are parts, but none can be taken up.
    """
    others = [each for each in outcomes if not take_up(each, folder_of(each.part, config), prints[each.part.name])]
    if others and not any(each.status == "done" or each.resumed for each in outcomes):
        names = ", ".join(each.part.name for each in others)
        raise UsageError(
            f"--out {config.out} holds {names} of another command, other sources of GradSync or another machine, so "
            "nothing can be resumed; give another --out to keep it, or leave out --resume to measure all anew"
        )


def run_parts(
    outcomes: list[Outcome], prints: dict[str, str], suite: dict[str, Any], config: SuiteConfig, console: Console
) -> None:
    """In turn, a round each. The report is written anew whenever one ends."""
    for outcome in outcomes:
        if (reason := why_absent(outcome.part)) and outcome.status == "missing":
            outcome.status, outcome.reason = "absent", reason
    left = [each for each in outcomes if each.status == "missing"]
    begun: list[RunningPart] = []
    try:
        with (
            OverallProgress(
                console, [(each.part.title, each.part.minutes, share_of(each, config)) for each in left]
            ) as bar,
            Job(config.out / "parts", patience=PATIENCE_S) as job,
            ExitStack() as resources,
        ):
            for number, outcome in enumerate(left):
                show = partial(bar.show, number)
                begun.append(RunningPart(job, outcome, config, prints[outcome.part.name], show))
            for each in begun:
                resources.enter_context(each)
            while running := [each for each in begun if not each.ended]:
                free, memory = memory_bytes()
                part = next_of(running, free / memory)
                part.take_turn()
                if part.ended:
                    write_report(suite, outcomes, config)
                    outcome = part.outcome
                    colour = {"failed": "red", "wrong": "bold red"}.get(outcome.status, "")
                    console.print(Text(f"{outcome.part.name}: {in_words(outcome)}", style=colour), soft_wrap=True)
    except BaseException:
        for each in begun:
            each.interrupt()
        raise


def why_absent(part: Part) -> str:
    """Why this machine cannot run a part; "" if it can, or if that remains to be seen."""
    if config_of(part) is None:
        return f"this version of GradSync has no verb {part.words[0]}"
    if part.script and not part.script.is_file():
        return f"{part.script} is not installed; use a checkout of GradSync"
    between_hosts = part.words[0] == "crossover" or "--hosts" in part.words
    return why_no_cluster() if between_hosts else ""


def folder_of(part: Part, config: SuiteConfig) -> Path:
    return config.out / "parts" / part.name


def command_of(part: Part, config: SuiteConfig) -> list[str]:
    """After `python -m benchmarks`."""
    language = [] if config.lang == "en" else ["--lang", config.lang]
    return part.command(folder_of(part, config), *language)


def share_of(outcome: Outcome, config: SuiteConfig) -> float:
    """Of its rounds, those that an earlier job has made."""
    return rounds_made(folder_of(outcome.part, config))[0] if outcome.resumed else 0.0


class Turn(Protocol):
    """What a part tells of itself when the next turn is given."""

    begun: bool

    @property
    def share(self) -> float: ...


T = TypeVar("T", bound=Turn)


def next_of(parts: Sequence[T], free: float) -> T:
    """The one that has made the smallest share of its rounds, the first of equals; one that has not begun only where
    there is room for its processes beside those of the others.

    Args:
        free: the share of the machine's memory that is.
    """
    begun = [each for each in parts if each.begun]
    return min(parts if free >= ROOM or not begun else begun, key=lambda each: each.share)


class RunningPart:
    """A part as a child of the job, which makes a round whenever it is given a turn; a context manager. What it prints
    is in its log.txt.

    Args:
        show: shows what share of the part is done, and what it does now.
    """

    def __init__(
        self, job: Job, outcome: Outcome, config: SuiteConfig, print_of_part: str, show: Callable[[float, str], None]
    ) -> None:
        self.outcome, self.ended = outcome, False
        self._job, self._config, self._print, self._show = job, config, print_of_part, show
        self._folder = folder_of(outcome.part, config)
        self.begun = False
        self._child: subprocess.Popen[bytes] | None = None
        self._share_before = share_of(outcome, config)
        self._resources, self._turns = ExitStack(), socket.socket(socket.AF_UNIX)

    def __enter__(self) -> RunningPart:
        self._resources.enter_context(self._turns)
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    @property
    def share(self) -> float:
        """Of its rounds, those that it has made."""
        return rounds_made(self._folder)[0] if self.begun or self.outcome.resumed else 0.0

    def take_turn(self) -> None:
        """Returns when it has made a round, or has ended, which the outcome then tells."""
        begun, before = time.monotonic(), self.outcome.seconds
        if self._child is None:
            self._child, self.begun = self._start(), True
        else:
            with suppress(OSError):  # it has died while it waited
                self._turns.sendall(TURN)
        late = False
        while not late and self._child.poll() is None:
            self.outcome.seconds = before + time.monotonic() - begun
            if self._has_made_a_round():
                keep(self.outcome, self._folder, self._print, begun=True)
                return
            share, what = told_by(self._folder / TOLD)
            self._show(min(NEARLY, self._share_before + share), what)
            late = self.outcome.seconds > 60 * self.outcome.part.limit
        self._job.end(self._child)
        self.ended = True
        (self._folder / TOLD).unlink(missing_ok=True)
        judge(self.outcome, self._folder, 0 if late else self._child.returncode, late=late)
        keep(self.outcome, self._folder, self._print)
        (self._folder / ROUNDS_FILE).unlink(missing_ok=True)
        self._show(1.0, "")

    def interrupt(self) -> None:
        """The job has ended: what there is of a part that has not, it has in whole rounds."""
        if self.ended or not (self.begun or self.outcome.resumed):
            return
        (self._folder / TOLD).unlink(missing_ok=True)
        _, words, results = rounds_made(self._folder)
        self.outcome.reason, self.outcome.results = f"interrupted{words}", results
        self.outcome.status = "incomplete" if results else "missing"

    def _start(self) -> subprocess.Popen[bytes]:
        if not self.outcome.resumed:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        keep(self.outcome, self._folder, self._print, begun=True)
        address = self._job.scratch / f"turns-{secrets.token_hex(4)}"  # short: it is a socket's
        self._turns.bind(str(address))
        self._turns.listen(1)
        environment = {PROGRESS_VARIABLE: str(self._folder / TOLD), TURNS_VARIABLE: str(address)}
        words = ["-m", "benchmarks", *command_of(self.outcome.part, self._config)]
        name = self.outcome.part.name
        return self._job.start(name, words, log=f"{name}/log.txt", environment=environment)

    def _has_made_a_round(self) -> bool:
        """Waits a little."""
        if not select.select([self._turns], (), (), POLL_S)[0]:
            return False
        if self._turns.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listener, self._turns = self._turns, self._turns.accept()[0]
            listener.close()
            self._resources.enter_context(self._turns)
            return False
        with suppress(ConnectionResetError):  # it has died with a turn unread
            if self._turns.recv(1):
                return True
        with suppress(subprocess.TimeoutExpired):  # all rounds are made: it writes its report
            assert self._child
            self._child.wait(POLL_S)
        return False


def judge(outcome: Outcome, folder: Path, code: int, *, late: bool) -> None:
    """Note what has become of a part that has ended."""
    outcome.results = load_results(folder)
    if late:
        _, words, made = rounds_made(folder)
        outcome.results = outcome.results or made
        outcome.status, outcome.reason = "failed", f"it took longer than {outcome.part.limit:g} minutes (limit){words}"
    elif code:
        outcome.status, outcome.reason = "failed", reason_in(folder / "log.txt", code)
        if code == CertificateFailed.exit_code:
            outcome.status = "wrong"
            outcome.results = outcome.results if (outcome.results or {}).get("runs") == [] else None
    elif outcome.results is None:
        outcome.status, outcome.reason = "failed", "it ended well but left no results"
    else:
        outcome.status, outcome.reason = "done", ""


def rounds_made(folder: Path) -> tuple[float, str, dict[str, Any] | None]:
    """Of all rounds the share that a part has made, the same in words, and the results that they make."""
    try:
        kept = json.loads((folder / ROUNDS_FILE).read_text())
    except (OSError, ValueError):
        return 0.0, "", None
    return kept["made"] / kept["count"], f" after {kept['made']} of {kept['count']} rounds", kept["results"]


def reason_in(log: Path, code: int) -> str:
    """The error in a command's own words, else the last line that it printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    own = [line.partition(": ")[2] for line in lines if line.startswith("benchmarks ")]
    return next(iter([*own[-1:], *lines[-1:]]), f"exit code {code} without a word")


def load_results(folder: Path) -> dict[str, Any] | None:
    """The results that a part's folder holds; None if there are none, or not to their end."""
    for name in RESULT_FILES:
        try:
            found = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and kind_of(found):
            return found
    return None


def keep(outcome: Outcome, folder: Path, print_of_part: str, *, begun: bool = False) -> None:
    """For --resume."""
    status = "begun" if begun else outcome.status
    content = {"status": status, "seconds": outcome.seconds, "fingerprint": print_of_part}
    unfinished = folder / "part.json.new"
    unfinished.write_text(json.dumps(content) + "\n")
    unfinished.replace(folder / "part.json")


def take_up(outcome: Outcome, folder: Path, print_of_part: str) -> bool:
    """What an earlier run has measured well with the same command, sources and machine, all of it or some rounds; False
    if with others."""
    try:
        kept = json.loads((folder / "part.json").read_text())
    except (OSError, ValueError):
        return True
    results = load_results(folder)
    complete = kept.get("status") == "done" and results is not None
    some = kept.get("status") == "begun" and rounds_made(folder)[0] > 0
    if not complete and not some:
        return True
    if kept.get("fingerprint") != print_of_part:
        return False
    outcome.seconds = kept["seconds"]
    if complete:
        outcome.status, outcome.reason, outcome.results = "done", "", results
    outcome.resumed = some
    return True


def fingerprint(part: Part) -> str:
    """Of all that a result depends on: the command, the program, our sources (a commit may be dirty), the machine."""
    sources = [path for package in PACKAGES for path in sorted((Path(__file__).parents[1] / package).rglob("*.py"))]
    digest = hashlib.sha256()
    for path in [*sources, *([part.script] if part.script and part.script.is_file() else [])]:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    told = [part.words, part.arguments, cpu_name(), len(os.sched_getaffinity(0)), sys.version]
    digest.update(json.dumps(told).encode())
    return digest.hexdigest()


def write_report(suite: dict[str, Any], outcomes: list[Outcome], config: SuiteConfig) -> None:
    results = {**suite, "parts": [each.to_json() for each in outcomes]}
    with speaking(config.lang):
        texts = dict(written(results))
    for name, text in texts.items():
        unfinished = config.out / f"{name}.new"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(config.out / name)


def written(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "suite.json", json.dumps(results, indent=1) + "\n"
    yield "suite.md", to_markdown(results)
    yield "suite.html", to_html(results)


def in_words(outcome: Outcome) -> str:
    return f"done in {outcome.seconds:.0f} s" if outcome.status == "done" else f"{outcome.status}: {outcome.reason}"
