"""One run of one program under one variant, as its users start it."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.programs import recording
from benchmarks.programs.manifest import Program, lay_out, with_data
from benchmarks.programs.records import Recorded, read_records
from benchmarks.records.programs import Outcome
from benchmarks.training.program import ProgramFailed, reason_in, tails
from common.launch.job import Job
from common.system.mkl import CPU_TYPE

__all__ = ["VARIANTS", "run_variant"]

ROOT = Path(__file__).parents[2]  # of our packages
SEED = 7
SITE, HOME = "site", "home"  # beside the repositories: packages, and a home with Paddle's data sets


def of_paddle(program: Program, nranks: int, log: Path) -> list[str]:
    if program.spawns:
        return []
    return [
        "-m",
        "paddle.distributed.launch",
        "--nproc_per_node",
        str(nranks),
        "--backend",
        "gloo",
        "--log_dir",
        str(log),
    ]


def of_collective(_: Program, nranks: int, log: Path) -> list[str]:
    return ["-m", "collective.run", "--nranks", str(nranks), "--log-dir", str(log)]


def of_ps(_: Program, nranks: int, log: Path) -> list[str]:
    return ["-m", "ps.run", "--trainers", str(nranks), "--servers", "1", "--log-dir", str(log)]


VARIANTS = {"paddle": of_paddle, "collective": of_collective, "ps": of_ps}


def run_variant(
    program: Program, variant: str, folder: Path, nranks: int, keep: Path | None = None
) -> tuple[Outcome, Recorded]:
    """Run the program once in a new copy of its files.

    Args:
        variant: of VARIANTS.
        folder: of all programs.
        keep: a folder for the records, which is new; None: they are not kept.

    Returns:
        How it ended, and what it trained and printed. Nothing has been compared yet.
    """
    with tempfile.TemporaryDirectory(prefix="programs-") as temporary:
        home, log, records = (Path(temporary, name) for name in ("program", "log", "records"))
        records = (keep or records).resolve()  # the program runs in another folder
        records.mkdir(parents=True)
        start, script = lay_out(program, folder, home)
        command = [
            *VARIANTS[variant](program, nranks, log),
            os.path.relpath(script, start),
            *(with_data(word, folder) for word in program.arguments),
        ]
        begin = time.monotonic()
        try:
            run(program, variant, command, start, log, environment_of(program, folder.resolve(), records))
            found = read_records(records)
            if gone := [str(rank) for rank in range(nranks) if rank not in found]:
                raise ProgramFailed(f"ended well, but left no record of rank {', '.join(gone)}", tails(log))
        except ProgramFailed as exc:
            return Outcome(how="failed", error=str(exc), output=exc.output, seconds=time.monotonic() - begin), {}
        return Outcome(how="ok", seconds=time.monotonic() - begin), found


def run(
    program: Program, variant: str, command: list[str], start: Path, log: Path, environment: Mapping[str, str]
) -> None:
    """
    Raises:
        ProgramFailed: it ended with an error, or not within its time.
    """
    with Job(log) as job:
        through = ("env", "-C", str(start))
        process = job.start(variant, command, log="launcher.log", environment=environment, through=through)
        try:
            process.wait(program.seconds)
        except subprocess.TimeoutExpired as exc:
            raise ProgramFailed(f"still ran after {program.seconds:g} s", tails(log)) from exc
        if process.returncode:
            raise ProgramFailed(f"exit code {process.returncode}{reason_in(log, 'programs.json')}", tails(log))


def environment_of(program: Program, folder: Path, records: Path) -> dict[str, str]:
    """The same for all variants. One thread computes, with the same instructions, so that bits can agree."""
    path = [*recording.__path__, str(ROOT), str(folder / SITE), os.environ.get("PYTHONPATH", "")]
    found = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        CPU_TYPE: os.environ.get(CPU_TYPE, "5"),
        "PROGRAMS_RECORD": str(records),
        "PROGRAMS_SEED": str(SEED),
        "PROGRAMS_SAME_SEED": "1" if program.spawns else "",
        "PROGRAMS_BATCHES": str(program.batches),
    }
    return {**found, "HOME": str(folder / HOME)} if (folder / HOME).is_dir() else found
