"""`python -m benchmarks scale`: groups of hundreds of ranks on this machine, and what larger ones would do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.page.language import LANGUAGES
from benchmarks.records.environment import head
from benchmarks.records.result_files import write_results
from benchmarks.records.scale import ScaleResults
from benchmarks.reports.scale import columns, rows
from benchmarks.reports.writing import write_report
from benchmarks.scale.counts import at_start
from benchmarks.scale.group import measure
from common.errors import UsageError, choose
from common.launch.cli import check_writable

__all__ = ["ScaleConfig", "scale"]

FILE = "scale.json"
COUNTED = (16, 64, 256, 1024, 4096)


@dataclass(frozen=True, kw_only=True)
class ScaleConfig:
    """Start groups of many NumPy ranks: how long they take to meet, what each rank holds, who names a killed one."""

    ranks: str = "64,256"
    """How many, separated by commas; each at least 3."""
    backends: str = "shm,tcp"
    """shm, tcp."""
    out: Path = Path("out/scale")
    """Folder for scale.json, scale.md and scale.html."""
    lang: str = "en"
    """Language of the report: en or zh."""

    def __post_init__(self) -> None:
        choose("language", self.lang, LANGUAGES)
        for backend in self.backends.split(","):
            choose("backend", backend, ("shm", "tcp"))
        if not all(each.isdecimal() and int(each) > 2 for each in self.ranks.split(",")):
            raise UsageError(f"--ranks must be numbers of at least 3, separated by commas (got {self.ranks})")


def scale(config: ScaleConfig) -> int:
    """Returns 1 if a killed rank was not named by all.

    Raises:
        UsageError: the results cannot be written.
        GradSyncError: a group did not come together.
    """
    check_writable("out", config.out / FILE, make_folder=True)
    console = Console(highlight=False, soft_wrap=True)
    results = ScaleResults(**head(), groups=[], at_start=[at_start(nranks) for nranks in COUNTED])
    for nranks in map(int, config.ranks.split(",")):
        for backend in config.backends.split(","):
            console.print(f"{nranks} ranks over {backend}: starting")
            results.groups.append(measure(nranks, backend))
            write_results(results, config.out / FILE, None)  # the rest may be interrupted
    write_report(results, config.out, Path(FILE).stem, config.lang)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in columns():
        table.add_column(title, justify="right", vertical="bottom")
    for row in rows(results):
        table.add_row(*row)
    console.print(table)
    console.print(f"\nreport: {(config.out / FILE).with_suffix('.html')}")
    return int(any(each.named < each.nranks - 1 for each in results.groups))
