"""Small commits in a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.commit.folder import CommitFolder
from common.commit.manifest import Manifest
from common.commit.parts import Part

__all__ = ["NAMES", "commit", "folder_of"]

NAMES = ("rank-0", "rank-1", "server-0")


def part_of(step: int, name: str) -> Part:
    words = np.random.default_rng([step, NAMES.index(name)]).random(3000, np.float32)
    return Part({"parameters.w": words, "optimizer.0-304.power": np.float32([step])}, {"step": step})


def commit(folder: CommitFolder, step: int) -> None:
    """Of two ranks and a server, some 12 KB each."""
    for name in NAMES:
        folder.write_part(step, name, part_of(step, name))
    entries = {name: entry for name in NAMES if (entry := folder.entry(step, name))}
    folder.write_manifest(
        Manifest(scheme="ps", nranks=2, servers=1, step=step, epoch=0, parts=entries, parameters_sha256="00")
    )


def folder_of(path: Path, *steps: int) -> CommitFolder:
    """With commits of these steps."""
    folder = CommitFolder(path)
    folder.make()
    for step in steps:
        commit(folder, step)
    return folder
