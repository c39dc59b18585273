"""`python -m benchmarks faults`: what goes wrong on purpose, and whether each scheme keeps what it promises then."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from msgspec import structs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.faults.cases import CASES, SIMULATORS, Case, NotKept, simulation
from benchmarks.faults.random_kills import BACKENDS, NRANKS, Result, random_kills, soak
from benchmarks.faults.simulated import PromiseBroken
from benchmarks.page.language import LANGUAGES
from benchmarks.records.environment import head
from benchmarks.records.faults import FaultOutcome, FaultsResults
from benchmarks.records.result_files import plain
from benchmarks.reports.faults import heads, scoreboard
from benchmarks.reports.writing import write_report
from common.errors import GradSyncError, UsageError, choose
from common.launch.cli import check_writable
from common.system.atomic_file import write_file

__all__ = ["FaultsConfig", "chosen", "faults"]

FILE = "faults.json"
RANDOM, SOAK, SIMULATED = 1, 19, 21  # rows
SAME_BITS = "the bits of an undisturbed job"
PROMISES = {  # of a simulation
    "ps": "each message once, and the bits of an undisturbed run",
    "ring": "the bits of an undisturbed job, or RecoveryFailed once restarts are used up",
}


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """Kill, freeze and cut off processes of small jobs, and see whether each scheme keeps its promises."""

    rows: str = ""
    """Rows of the table of faults, separated by commas: 1, 2, 4, 5, 6, 7, 8, 21. (default: all)"""
    schemes: str = "ps,ring"
    """ps, ring."""
    times: int = 1
    """How often each case is made."""
    seeds: int = 10_000
    """How many seeds of each scheme are simulated."""
    seed: int | None = None
    """Simulate this seed of each scheme only, and print all that happens. (default: none)"""
    random_kills: int = 0
    """Make so many jobs lose a process at a random moment instead, half of them of 2 ranks and half of 4."""
    soak: int = 0
    """Make a job of so many steps instead, which loses a process again and again; beside --random-kills, both."""
    kill_every: int = 500
    """Steps between two kills of a soak."""
    mtbf: float = 0.0
    """Mean seconds between two kills of a soak, which then come at any moment; 0: by --kill-every."""
    kill_seed: int = 1
    """By which these kills choose who and when."""
    out: Path = Path("out/faults")
    """Folder for faults.json, faults.md and faults.html."""
    lang: str = "en"
    """Language of the report: en or zh."""

    def __post_init__(self) -> None:
        choose("language", self.lang, LANGUAGES)
        if self.times < 1 or self.seeds < 1:
            raise UsageError(f"--times and --seeds must be at least 1 (got {self.times} and {self.seeds})")
        if min(self.random_kills, self.soak) < 0 or self.kill_every < 1:
            raise UsageError(
                "--random-kills and --soak must be at least 0, --kill-every at least 1 "
                f"(got {self.random_kills}, {self.soak} and {self.kill_every})"
            )
        if not 0 <= self.mtbf < float("inf"):
            raise UsageError(f"--mtbf must be a number of seconds, at least 0 (got {self.mtbf})")
        if self.mtbf and not self.soak:
            raise UsageError("--mtbf needs --soak: how many steps is the job to make?")
        known = {str(case.row) for case in CASES} | {str(SIMULATED)}
        for row in filter(None, self.rows.split(",")):
            if row not in known:
                raise UsageError(f"--rows: there is no row {row}; there are {', '.join(sorted(known, key=int))}")
        for scheme in self.schemes.split(","):
            if scheme not in ("ps", "ring"):
                raise UsageError(f"--schemes must be of ps and ring (got {scheme})")


def faults(config: FaultsConfig, cases: Sequence[Case] = CASES) -> int:
    """Returns 1 if a promise was not kept.

    Raises:
        UsageError: the results cannot be written.
    """
    if config.seed is not None:
        return max(replay(scheme, config.seed) for scheme in config.schemes.split(","))
    check_writable("out", config.out / FILE, make_folder=True)
    console = Console(highlight=False, soft_wrap=True)
    results = FaultsResults(**head(), outcomes=[])
    for outcome in outcomes_of(config, cases, lambda line: console.print(escape(line))):
        results.outcomes.append(outcome)
        console.print(escape(line_of(outcome)))
        write_file(config.out / FILE, json.dumps(plain(results), indent=1) + "\n")  # the rest may be interrupted
    console.print()
    console.print(table_of(results))
    write_report(results, config.out, "faults", config.lang)
    console.print(f"\nreport: {config.out / 'faults.html'}", soft_wrap=True)
    return int(any(each.kept < each.times for each in results.outcomes))


def outcomes_of(config: FaultsConfig, cases: Sequence[Case], tell: Callable[[str], None]) -> Iterator[FaultOutcome]:
    """Of what is asked for, as it is made."""
    if config.random_kills or config.soak:
        yield from kills(config, tell)
        return
    for case in chosen(config, cases):
        yield outcome_of(case, 1 if case.row == SIMULATED else config.times)


def kills(config: FaultsConfig, tell: Callable[[str], None]) -> Iterator[FaultOutcome]:
    """Random ones, then the soak, of each scheme."""
    schemes = config.schemes.split(",")
    for scheme in schemes if config.random_kills else ():
        for nranks in NRANKS:
            count = -(-config.random_kills // (len(schemes) * len(NRANKS)))
            found = random_kills(scheme, nranks, count, config.kill_seed, tell)
            yield of_kills(RANDOM, f"random kills, {nranks} ranks", scheme, SAME_BITS, found, found.kills)
    for scheme in schemes if config.soak else ():
        found = soak(scheme, config.soak, config.kill_every, config.kill_seed, tell, mtbf=config.mtbf)
        name = f"{config.soak:,} steps, {found.kills} kills"
        yield of_kills(SOAK, name, scheme, f"{SAME_BITS}, and no process grows", found, 1)


def of_kills(row: int, name: str, scheme: str, promise: str, found: Result, times: int) -> FaultOutcome:
    return FaultOutcome(
        row=row,
        name=name,
        scheme=scheme,
        backend="+".join(BACKENDS[scheme][: 1 if row == SOAK else None]),
        promise=promise,
        times=times,
        kept=found.kept,
        recoveries=found.recoveries,
        usage=found.usage,
        why_not=found.why_not,
    )


def replay(scheme: str, seed: int) -> int:
    try:
        found = SIMULATORS[scheme](seed, print)
    except PromiseBroken as exc:
        print(f"{scheme}: {exc}")
        return 1
    print(f"{scheme}: seed {seed}: {found}")
    return 0


def chosen(config: FaultsConfig, cases: Sequence[Case]) -> list[Case]:
    rows, schemes = config.rows.split(",") if config.rows else [], config.schemes.split(",")
    name = f"{config.seeds:,} seeds"
    simulations = [
        Case(SIMULATED, name, scheme, "simulated", promise, partial(simulation, scheme, 0, config.seeds))
        for scheme, promise in PROMISES.items()
    ]
    wanted = [case for case in [*cases, *simulations] if case.scheme in schemes]
    return [case for case in wanted if not rows or str(case.row) in rows]


def outcome_of(case: Case, times: int) -> FaultOutcome:
    """Of a case, made so often."""
    about = FaultOutcome(row=case.row, name=case.name, scheme=case.scheme, backend=case.backend, promise=case.promise)
    if why := case.why_not_here:
        return structs.replace(about, skipped=why)
    kept, noticed, why_not = 0, [], ""
    for _ in range(times):
        try:
            noticed += [round(each, 3) for each in case.run()]
            kept += 1
        except (NotKept, GradSyncError) as exc:
            why_not = why_not or str(exc)
    return structs.replace(about, times=times, kept=kept, detection_s=noticed, why_not=why_not)


def line_of(each: FaultOutcome) -> str:
    what = f"row {each.row}: {each.scheme} ({each.backend}): {each.name}: {each.promise}"
    if each.skipped:
        return f"{what}: skipped: {each.skipped}"
    noticed = f", noticed after {max(each.detection_s):.2f} s at most" if each.detection_s else ""
    again = f", complete again after {recovered(each)}" if each.recoveries else ""
    return f"{what}: {each.kept} of {each.times}{noticed}{again}{f': {each.why_not}' if each.why_not else ''}"


def recovered(each: FaultOutcome) -> str:
    """After how many seconds."""
    whole = [recovery.whole_s for recovery in each.recoveries]
    rest = [recovery.whole_s - recovery.starting_s for recovery in each.recoveries]
    return (
        f"p50 {median(whole):.2f} s, max {max(whole):.2f} s; "
        f"{median(rest):.2f} and {max(rest):.2f} s beside the new process's start"
    )


def table_of(results: FaultsResults) -> Table:
    """The scoreboard."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for number, title in enumerate(heads()):
        table.add_column(title, justify="right" if number else "left", vertical="bottom")
    for row in scoreboard(results):
        table.add_row(*row)
    return table
