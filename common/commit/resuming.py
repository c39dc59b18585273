"""Going on from a commit: whose parts it has, what their arrays are called, whether it is of this training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from common.commit.folder import CommitFolder
from common.commit.manifest import Manifest
from common.commit.slices import Slice, slices_in
from common.errors import UsageError

__all__ = [
    "ACCUMULATORS",
    "BUFFERS",
    "OPTIMIZER",
    "PARAMETERS",
    "RANDOM",
    "check_fits",
    "optimizer_slices",
    "participants",
    "steps_ahead",
]

# How the names of arrays in parts begin. Rank 0 has the parameters, and of a program of the user's the optimizer's
# accumulators by Paddle's keys; of the built-in training everyone has the slices that it keeps.
PARAMETERS, OPTIMIZER, ACCUMULATORS = "parameters.", "optimizer.", "accumulators."
BUFFERS, RANDOM = "buffers.", "random."  # of each rank: what else its model has, and its generators


def participants(nranks: int, servers: int) -> list[str]:
    """The names of all that have parts."""
    return [*(f"rank-{rank}" for rank in range(nranks)), *(f"server-{index}" for index in range(servers))]


def check_fits(
    manifest: Manifest, folder: CommitFolder, *, nranks: int, job: Mapping[str, Any], elastic: str | None
) -> str:
    """
    Args:
        elastic: how to ask for going on with another number of ranks; None: that was done.

    Returns:
        What to say of going on.

    Raises:
        UsageError: it is of another training, or of another number of ranks, and nobody has asked for that.
    """
    goes_on = f"goes on from the commit of step {manifest.step:,} in {folder}"
    if manifest.nranks != nranks:
        if elastic:
            raise UsageError(
                f"the commit of step {manifest.step:,} in {folder} is of {manifest.nranks} rank(s), this job has "
                f"{nranks}; give it {manifest.nranks} again (another number of servers, or the other scheme, will do), "
                f"or {elastic}: its bits are another run's then"
            )
        goes_on += f", of {manifest.nranks} rank(s), with {nranks}: from here on its bits are another run's"
    for name, value in job.items():
        if manifest.job.get(name, value) != value:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"the commits in {folder} are of {flag} {manifest.job[name]}, this job has {flag} {value}; give the "
                "same flags, or begin in another --checkpoint-dir"
            )
    return goes_on


def steps_ahead(manifest: Manifest, nranks: int, steps_per_epoch: Callable[[int], int]) -> int:
    """`Manifest.ahead` where so many ranks go on: of the epoch under way they leave out what was trained with, rounded
    down to whole steps.

    Args:
        steps_per_epoch: of a number of ranks.
    """
    if manifest.nranks == nranks:
        return manifest.ahead
    epoch, step = divmod(manifest.step - manifest.ahead, steps_per_epoch(manifest.nranks))
    there = step * manifest.nranks // nranks
    return manifest.step - epoch * steps_per_epoch(nranks) - min(there, steps_per_epoch(nranks))


def optimizer_slices(folder: CommitFolder, manifest: Manifest) -> list[Slice]:
    """What ranks and servers had kept of the built-in trainer's optimizer.

    Raises:
        CommitCorrupt: a part is not what was written.
    """
    parts = (folder.part(manifest, name) for name in manifest.parts)
    return [each for part in parts for each in slices_in(part.beginning(OPTIMIZER))]
