"""`python -m benchmarks programs`: others' programs, unmodified, under Paddle's own groups and under both schemes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec import structs
from rich.console import Console
from rich.markup import escape

from benchmarks.programs.kept import Kept
from benchmarks.programs.manifest import MANIFEST, Program, missing, read_manifest
from benchmarks.programs.records import Recorded, compared
from benchmarks.programs.variants import run_variant
from benchmarks.records.environment import head
from benchmarks.records.programs import Outcome, ProgramOutcome, ProgramsResults
from benchmarks.records.result_files import plain
from benchmarks.reports.programs import row_of, verdict
from benchmarks.reports.writing import write_report
from common.errors import UsageError, choose
from common.launch.cli import check_writable
from common.launch.settings import check_rank
from common.system.atomic_file import write_file

__all__ = ["ProgramsConfig", "programs"]

SCHEMES = ("collective", "ps")
PADDLE_RUNS = 8  # at most, of a program whose bits a scheme does not have: does Paddle itself always have them?
Run = Callable[[Program, str, Path, int, Path | None], tuple[Outcome, Recorded]]
NOT_RUN = Outcome(how="not run")
FILE = "programs.json"


@dataclass(frozen=True, kw_only=True)
class ProgramsConfig:
    """Run public programs, unmodified, under Paddle with Gloo, `collective` and `ps`, and compare what they trained."""

    programs: Path
    """Folder where the programs lie, a folder for each repository: OWNER+NAME. What is not there is skipped."""
    only: str = ""
    """Names of programs, separated by commas. (default: all)"""
    nranks: int = 2
    """Number of ranks."""
    manifest: Path = MANIFEST
    """Where each program is from, and what is set for it."""
    out: Path = Path("out/programs")
    """Folder for programs.json and programs.md, and for what Paddle's own runs trained."""
    keep_paddle: bool = False
    """Take Paddle's runs that an earlier call has left in --out, where the program is the same. (default: false)"""

    def __post_init__(self) -> None:
        check_rank(0, self.nranks)
        if not self.programs.is_dir():
            raise UsageError(f"--programs {self.programs} is no folder")


def programs(config: ProgramsConfig, run: Run = run_variant) -> int:
    """Returns 1 if a program that works under Paddle does not under both schemes.

    Raises:
        UsageError: there is no program of such a name, or the results cannot be written.
        DataError: the manifest cannot be read.
    """
    check_writable("out", config.out / FILE, make_folder=True)
    chosen = chosen_of(read_manifest(config.manifest), config.only)
    console = Console(highlight=False)
    skipped = {program.name: why for program in chosen if (why := missing(program, config.programs))}
    for name, why in skipped.items():
        console.print(f"{name}: skipped: {escape(why)}", soft_wrap=True)
    results = ProgramsResults(**head(), nranks=config.nranks, programs=[], skipped=skipped)
    kept = Kept(config.out / "paddle", reuse=config.keep_paddle)
    for program in chosen:
        if program.name in skipped:
            continue
        results.programs.append(outcome_of(program, config, kept, run))
        console.print(escape(" | ".join(row_of(results.programs[-1]))), soft_wrap=True)
        write(results, config.out)  # the rest may be interrupted
    if not results.programs:
        raise UsageError(f"--programs {config.programs} holds none of the programs: {next(iter(skipped.values()))}")
    for line in verdict(results):
        console.print(line, style="bold", soft_wrap=True)
    console.print(f"\nreport: {config.out / 'programs.html'}", soft_wrap=True)
    return int(not all(each.works for each in results.programs))


def chosen_of(known: list[Program], only: str) -> list[Program]:
    names = [program.name for program in known]
    wanted = only.split(",") if only else names
    for name in wanted:
        choose("program", name, names)
    return [program for program in known if program.name in wanted]


def outcome_of(program: Program, config: ProgramsConfig, kept: Kept, run: Run) -> ProgramOutcome:
    """Under Paddle, and once more if it fails; then under the schemes; where one of them ended otherwise, under Paddle
    again until that does."""

    def by_paddle(number: int) -> tuple[Outcome, Recorded]:
        make = partial(run, program, "paddle", config.programs, config.nranks)
        return kept.run(program, config.nranks, number, make)

    number = 1
    paddle, first = by_paddle(number)
    if not paddle.works:  # what is lost over Gloo now and then shall not hide what the schemes do
        number += 1
        paddle, first = by_paddle(number)
    found = {each: run(program, each, config.programs, config.nranks, None) for each in SCHEMES if paddle.works}
    ended = [recorded for outcome, recorded in found.values() if outcome.works]
    again = first
    most = number if program.waived else PADDLE_RUNS
    while number < most and not all(compared(each, first, again).works for each in ended):
        number += 1
        paddle, again = by_paddle(number)
    ours = {scheme: judged(program, *run_, first, again) for scheme, run_ in found.items()}
    return ProgramOutcome(
        name=program.name,
        repository=program.repository,
        commit=program.commit,
        path=program.path,
        settings=program.settings,
        paddle=paddle,
        collective=ours.get("collective", NOT_RUN),
        ps=ours.get("ps", NOT_RUN),
    )


def judged(program: Program, outcome: Outcome, ours: Recorded, paddle: Recorded, again: Recorded) -> Outcome:
    """A run of ours against Paddle's. What need not be Paddle's is well if it ended well."""
    if not outcome.works:
        return outcome
    verdict = compared(ours, paddle, again)
    if program.waived and not verdict.works:
        verdict = Outcome(how="ok")
    return structs.replace(verdict, seconds=outcome.seconds)


def write(results: ProgramsResults, folder: Path) -> None:
    write_file(folder / FILE, json.dumps(plain(results), indent=1) + "\n")
    write_report(results, folder, "programs", "en")
