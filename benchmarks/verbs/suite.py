"""`compare --preset` and `compare --config`: the parts of a job in turn, a round each, and one report of them all."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from benchmarks.netlab.cluster import why_no_cluster
from benchmarks.page.language import LANGUAGES, speaking
from benchmarks.records.environment import head
from benchmarks.records.result_files import plain
from benchmarks.records.suite import SuiteResults
from benchmarks.reports.suite import print_summary
from benchmarks.reports.writing import to_html, to_markdown
from benchmarks.suites.job_file import JobFile, Part, config_of, preset, presets, read_job
from benchmarks.suites.part import Outcome, RunningPart, fingerprint, take_up
from benchmarks.training.stand_in import write_idx_files
from common.errors import CertificateFailed, GradSyncError, UsageError, choose
from common.launch.cli import check_writable
from common.launch.job import Job
from common.system.atomic_file import write_file
from common.system.memory import memory_bytes

__all__ = ["SuiteConfig", "run_suite"]

ROOM = 0.5  # of the memory, that another part finds free where it begins while others wait
PATIENCE_S = 15.0  # a command that is told to end ends its own processes first


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """Run all parts of a job, a preset or a TOML file, in turn, a round each, and write one report of them."""

    preset: str | None = None
    """quick (some minutes), full (less than an hour) or accuracy."""
    config: Path | None = None
    """A job of your own, as docs/benchmarks.md describes it, instead of a preset."""
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


def run_suite(config: SuiteConfig) -> None:
    """Run the parts; whatever ends this, the report says what has been measured and what is missing.

    Raises:
        CertificateFailed: in some part, whose speed is then not shown.
        GradSyncError: a part failed.
        UsageError: nothing of what there is can be resumed; it is left as it is.
    """
    check_writable("out", config.out / "suite.json", make_folder=True)
    job = config.job()
    console = Console(highlight=False)
    outcomes = [Outcome(p, shlex.join(["python", "-m", "benchmarks", *command_of(p, config)])) for p in job.parts]
    suite = SuiteResults(**head(), title=job.title, synthetic=job.synthetic, parts=[])
    prints = {each.part.name: fingerprint(each.part) for each in outcomes}
    if config.resume:
        resume(outcomes, prints, config)
    try:
        run_parts(outcomes, prints, suite, config, console)
    finally:
        write_report(suite, outcomes, config)
        print_summary(replace(suite, parts=[each.record() for each in outcomes]), console)
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
    outcomes: list[Outcome], prints: dict[str, str], suite: SuiteResults, config: SuiteConfig, console: Console
) -> None:
    """In turn, a round each. The report is written anew whenever one ends."""
    for outcome in outcomes:
        if (reason := why_absent(outcome.part)) and outcome.status == "missing":
            outcome.status, outcome.reason = "absent", reason
    left = [each for each in outcomes if each.status == "missing"]
    console.print(f"{len(left)} parts, about {sum(each.part.minutes for each in left):.0f} minutes")
    begun: list[RunningPart] = []
    try:
        with (
            console.status("") as status,
            Job(config.out / "parts", patience=PATIENCE_S) as job,
            ExitStack() as resources,
        ):

            def show(title: str, what: str) -> None:
                ended = f"{sum(each.ended for each in begun)} of {len(begun)} parts done"
                status.update(escape(f"{ended}; now {title}{f': {what}' if what else ''}"))

            for outcome in left:
                begun.append(
                    RunningPart(
                        job,
                        outcome,
                        folder=folder_of(outcome.part, config),
                        words=["-m", "benchmarks", *command_of(outcome.part, config)],
                        print_of_part=prints[outcome.part.name],
                        show=partial(show, outcome.part.title),
                    )
                )
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


def write_report(suite: SuiteResults, outcomes: list[Outcome], config: SuiteConfig) -> None:
    results = replace(suite, parts=[each.record() for each in outcomes])
    with speaking(config.lang):
        texts = dict(written(results))
    for name, text in texts.items():
        write_file(config.out / name, text)


def written(results: SuiteResults) -> Iterator[tuple[str, str]]:
    yield "suite.json", json.dumps(plain(results), indent=1) + "\n"
    yield "suite.md", to_markdown(results)
    yield "suite.html", to_html(results)


def in_words(outcome: Outcome) -> str:
    return f"done in {outcome.seconds:.0f} s" if outcome.status == "done" else f"{outcome.status}: {outcome.reason}"
