"""`python -m common.commit`: what commits a folder has, whether they are whole, and one of them as files for Paddle."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from common.commit.export import export
from common.commit.folder import CommitFolder
from common.errors import CommitCorrupt, GradSyncError, UsageError

__all__ = ["main"]

PROGRAM = "common.commit"


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(f"python -m {PROGRAM}", description="The commits of a training.")
    commands = parser.add_subparsers(required=True, metavar="list|verify|export")
    listing = commands.add_parser("list", help="a line for each commit")
    listing.set_defaults(do=lambda given: list_commits(given.folder))
    verify = commands.add_parser("verify", help="read every part, and compare it with its checksum")
    verify.set_defaults(do=lambda given: verify_commits(given.folder))
    exporting = commands.add_parser("export", help="write PREFIX.pdparams and PREFIX.pdopt")
    for command in (listing, verify, exporting):
        command.add_argument("folder", type=folder_named, metavar="DIR", help="the --checkpoint-dir of the training")
    exporting.add_argument("prefix", type=Path, metavar="PREFIX", help="how the names of both files begin")
    exporting.add_argument("--step", type=int, help="of the commit (default: the newest whole one)")
    exporting.set_defaults(do=lambda given: export_commit(given.folder, given.step, given.prefix))
    given = parser.parse_args(args)
    try:
        for line in given.do(given):
            print(line, flush=True)
    except GradSyncError as exc:
        print(f"{PROGRAM}: {type(exc).__name__}: {exc}", file=sys.stderr)
        return exc.exit_code
    return 0


def folder_named(name: str) -> CommitFolder:
    if not Path(name).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {name}")
    return CommitFolder(Path(name))


def list_commits(folder: CommitFolder) -> Iterator[str]:
    """From the manifests only."""
    there = folder.steps()
    if not there:
        yield f"there is no commit in {folder}"
    for step in there:
        try:
            manifest = folder.manifest(step)
        except CommitCorrupt as exc:
            yield f"step {step:,}: not whole: {exc}"
            continue
        size = sum(part.size for part in manifest.parts.values())
        servers = f", {manifest.servers} server(s)" if manifest.servers else ""
        yield (
            f"step {step:,}: epoch {manifest.epoch}, {manifest.scheme}, {manifest.nranks} rank(s){servers}, "
            f"{size:,} bytes, parameters sha256 {manifest.parameters_sha256}"
        )


def verify_commits(folder: CommitFolder) -> Iterator[str]:
    """
    Raises:
        CommitCorrupt: one is not whole, when all have been looked at.
    """
    broken = []
    for step in folder.steps():
        try:
            yield f"step {step:,}: whole, {len(folder.verify(step).parts)} parts"
        except CommitCorrupt as exc:
            broken.append(step)
            yield f"step {step:,}: not whole: {exc}"
    if broken:
        raise CommitCorrupt(f"{len(broken)} of {len(folder.steps())} commits in {folder} are not whole")


def export_commit(folder: CommitFolder, step: int | None, prefix: Path) -> Iterator[str]:
    """
    Raises:
        UsageError: there is none.
    """
    if step is None:
        newest = folder.newest()
        if newest is None:
            raise UsageError(f"there is no commit in {folder}")
        step = newest.step
    elif step not in folder.steps():
        there = ", ".join(map(str, folder.steps())) or "none"
        raise UsageError(f"there is no commit of step {step:,} in {folder} (there: {there})")
    for file in export(folder, step, prefix):
        yield f"step {step:,}: {file}"


if __name__ == "__main__":
    sys.exit(main())
