"""`compare --preset` and `compare --config`: the parts of a job one after the other, and one report of them all."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from benchmarks.cluster import why_no_cluster
from benchmarks.environment import cpu_name, describe_environment
from benchmarks.job import JobFile, Part, config_of, preset, presets, read_job
from benchmarks.kinds import RESULT_FILES
from benchmarks.language import LANGUAGES, speaking
from benchmarks.overall_progress import OverallProgress
from benchmarks.progress import PROGRESS_VARIABLE
from benchmarks.result_files import kind_of
from benchmarks.stand_in import write_idx_files
from benchmarks.suite_report import print_summary, to_html, to_markdown
from common.entry import check_writable
from common.errors import CertificateFailed, GradSyncError, UsageError, choose
from common.launch import Job

__all__ = ["SuiteConfig", "run_suite"]

SCHEMA = 1
POLL_S = 0.2
PATIENCE_S = 15.0  # a command that is told to end ends its own processes first
PACKAGES = ("benchmarks", "collective", "common", "ps")


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """Run all parts of a job, a preset or a TOML file, one after the other, and write one report of them."""

    preset: str | None = None
    """quick (some minutes), full (less than an hour) or accuracy."""
    config: Path | None = None
    """A job of your own, as docs/methodology.md describes it, instead of a preset."""
    data_dir: Path | None = None
    """Folder that holds a folder mnist and a folder fashion-mnist, each with the data set's four IDX .gz files.
    (default: synthetic data stand in for them)"""
    resume: bool = False
    """Keep the parts that --out holds, complete, from the same command, sources and machine."""
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
            this machine cannot run it.
        results: what its JSON holds, if it wrote one; of a wrong part only what has no speed.
    """

    part: Part
    command: str
    status: str = "missing"
    reason: str = "not run"
    seconds: float = 0.0
    results: dict[str, Any] | None = None

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
        UsageError: parts are complete, but none can be taken up.
    """
    others = [each for each in outcomes if not take_up(each, folder_of(each.part, config), prints[each.part.name])]
    if others and all(each.status != "done" for each in outcomes):
        names = ", ".join(each.part.name for each in others)
        raise UsageError(
            f"--out {config.out} holds {names} of another command, other sources of GradSync or another machine, so "
            "nothing can be resumed; give another --out to keep it, or leave out --resume to measure all anew"
        )


def run_parts(
    outcomes: list[Outcome], prints: dict[str, str], suite: dict[str, Any], config: SuiteConfig, console: Console
) -> None:
    """One after the other; the report is written anew after each."""
    for outcome in outcomes:
        if (reason := why_absent(outcome.part)) and outcome.status == "missing":
            outcome.status, outcome.reason = "absent", reason
    left = [each for each in outcomes if each.status == "missing"]
    with OverallProgress(console, [each.part.minutes for each in left]) as bar, Job():  # Job: SIGTERM ends it in order
        for outcome in left:
            folder = folder_of(outcome.part, config)
            bar.begin(outcome.part.title)
            try:
                run_part(outcome, command_of(outcome.part, config), folder, bar)
            except BaseException:
                outcome.reason = "interrupted"
                raise
            keep(outcome, folder, prints[outcome.part.name])
            write_report(suite, outcomes, config)
            colour = {"failed": "red", "wrong": "bold red"}.get(outcome.status, "")
            console.print(Text(f"{outcome.part.name}: {in_words(outcome)}", style=colour), soft_wrap=True)


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


def run_part(outcome: Outcome, command: list[str], folder: Path, bar: OverallProgress) -> None:
    """Run one part as a child and note what has become of it; what it printed is in its log.txt."""
    part = outcome.part
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    told = folder / "progress"
    begun = time.monotonic()
    late = False
    with Job(folder, patience=PATIENCE_S) as launcher:
        environment = {PROGRESS_VARIABLE: str(told)}
        words = ["-m", "benchmarks", *command]
        child = launcher.start(part.name, words, log="log.txt", environment=environment)
        while not late and child.poll() is None:
            try:
                child.wait(POLL_S)
            except subprocess.TimeoutExpired:
                late = time.monotonic() - begun > 60 * part.limit
                bar.read(told)
    told.unlink(missing_ok=True)
    outcome.seconds = time.monotonic() - begun
    outcome.results = load_results(folder)
    code = child.returncode
    if late:
        outcome.status, outcome.reason = "failed", f"it took longer than {part.limit:g} minutes (limit)"
    elif code:
        outcome.status, outcome.reason = "failed", reason_in(folder / "log.txt", code)
        if code == CertificateFailed.exit_code:
            outcome.status = "wrong"
            outcome.results = outcome.results if (outcome.results or {}).get("runs") == [] else None
    elif outcome.results is None:
        outcome.status, outcome.reason = "failed", "it ended well but left no results"
    else:
        outcome.status, outcome.reason = "done", ""


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


def keep(outcome: Outcome, folder: Path, print_of_part: str) -> None:
    """For --resume."""
    content = {"status": outcome.status, "seconds": outcome.seconds, "fingerprint": print_of_part}
    (folder / "part.json").write_text(json.dumps(content) + "\n")


def take_up(outcome: Outcome, folder: Path, print_of_part: str) -> bool:
    """What an earlier run has measured well with the same command, sources and machine; False if with others."""
    try:
        kept = json.loads((folder / "part.json").read_text())
    except (OSError, ValueError):
        return True
    results = load_results(folder)
    if results is None or kept.get("status") != "done":
        return True
    if kept.get("fingerprint") != print_of_part:
        return False
    outcome.status, outcome.reason, outcome.seconds, outcome.results = "done", "", kept["seconds"], results
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
