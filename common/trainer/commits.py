"""The commits of the built-in training: what of a rank's state is kept, and how it goes on from it.

Rank 0 keeps the parameters; every rank its random state, and what it alone has of the optimizer's state, or, where all
have the same, rank 0; servers keep theirs by themselves (ps/coordinator/commits.py). The data's order follows from the
step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from common.commit.folder import CommitFolder, say
from common.commit.manifest import Manifest, PartEntry, SlotEntry
from common.commit.parts import Part
from common.commit.plan import NO_COMMITS, CommitPlan
from common.commit.resuming import (
    OPTIMIZER,
    PARAMETERS,
    RANDOM,
    check_fits,
    optimizer_slices,
    participants,
    steps_ahead,
)
from common.commit.slices import arrays_of
from common.commit.writer import Writer
from common.errors import CommitCorrupt, UsageError
from common.launch.flags import TrainingConfig
from common.paddle_api.random_states import random_arrays, set_random
from common.sync.synchronizer import Synchronizer
from common.system.process import RESTARTS_VARIABLE
from common.tensors.arena import Arena, sha256_of_parameters

__all__ = ["Commits", "commits_of"]

EVERY, KEEP = 100, 3
SAME = ("model", "dataset", "batch_size", "seed", "optimizer")  # flags without which it is another training


class Commits:
    """Of a training that keeps none; a context manager."""

    first = 0  # the step to begin with
    ahead = 0  # by how many steps it is ahead of its place in the data, see Manifest

    def __init__(self, synchronizer: Synchronizer) -> None:
        self._synchronizer = synchronizer

    def prepare(self, arena: Arena, names: Sequence[str], *, at: int | None = None) -> None:  # noqa: ARG002 - as said
        """Before `attach`: rank 0 finds the commit to go on from, and fills the arena with its parameters.

        Args:
            names: Paddle's, of the parameters.
            at: the step to begin with, where all ranks have that state by other means.

        Raises:
            UsageError, CommitCorrupt: it cannot go on.
        """
        self.first = at or 0
        self._synchronizer.commits = CommitPlan(first=self.first)

    def restore(self) -> None:
        """After `attach`, on all ranks: where it begins, and the rest of the state unless `prepare` was told that."""

    def after(self, step: int, epoch: int) -> None:
        """So many steps have been made, and so many epochs are complete. Blocks for the copy.

        Raises:
            CommitFailed: an earlier commit could not be written.
        """

    def finish(self) -> None:
        """After the last step, on all ranks: blocks until all commits are written.

        Raises:
            CommitFailed: one could not be written.
        """

    def close(self) -> None:
        """Nothing is written any longer."""
        self._synchronizer.commits = NO_COMMITS

    def __enter__(self) -> Commits:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


class KeptCommits(Commits):
    """
    Args:
        folder: of the commits.
        every: steps between two.
        keep: how many stay.
        resume: whether to go on from one.
        anyhow: or to begin anew, if there is none.
        elastic: whether with another number of ranks, too.
        steps_per_epoch: of a number of ranks.
        job: the flags that are the same for all that go on from them.
        timeout: seconds to wait for the others' parts.
    """

    def __init__(
        self,
        folder: CommitFolder,
        synchronizer: Synchronizer,
        *,
        every: int,
        keep: int,
        resume: bool,
        anyhow: bool,
        elastic: bool,
        steps_per_epoch: Callable[[int], int],
        job: dict[str, Any],
        timeout: float,
    ) -> None:
        super().__init__(synchronizer)
        self._folder, self._job = folder, job
        self._every, self._keep, self._resume, self._anyhow, self._timeout = every, keep, resume, anyhow, timeout
        self._elastic, self._steps_per_epoch = elastic, steps_per_epoch
        self._name = f"rank-{synchronizer.rank}"
        self._writer = Writer(folder, self._name)

    def prepare(self, arena: Arena, names: Sequence[str], *, at: int | None = None) -> None:
        self._arena, self._names, self._at, self.first = arena, names, at, at or 0
        self._folder.make()
        if self._synchronizer.rank == 0:
            self._folder.hold()
            manifest = self._find() if at is None else self._before(at)
            if manifest:
                self.ahead = steps_ahead(manifest, self._synchronizer.nranks, self._steps_per_epoch)
            if manifest and at is None:
                self._fill(manifest)
                self.first = manifest.step
            self._folder.remove_after(self.first)
            self._folder.remove_unfinished()
        self._synchronizer.commits = CommitPlan(self._every, self.first)

    def _find(self) -> Manifest | None:
        if not self._resume:
            if self._folder.steps():
                raise UsageError(
                    f"{self._folder} has commits up to step {self._folder.steps()[-1]:,}; go on from there with "
                    "--resume, or name another --checkpoint-dir"
                )
            return None
        found = self._folder.newest()
        if found is None and not self._anyhow:
            raise UsageError(f"there is no commit in {self._folder} to go on from; begin without --resume")
        if found is not None:
            if not found.layout:
                raise UsageError(
                    f"the commits in {self._folder} are of a program with a TrainingState, not of the built-in "
                    "training; start that program, or name another --checkpoint-dir"
                )
            elastic = None if self._elastic else "--elastic"
            nranks = self._synchronizer.nranks
            goes_on = check_fits(found, self._folder, nranks=nranks, job=self._job, elastic=elastic)
            if difference := found.arena_layout().difference(self._arena.layout):
                raise UsageError(f"the commits in {self._folder} are of another model: {difference}")
            say(goes_on)
        return found

    def _before(self, step: int) -> Manifest | None:
        """Of the last commit until then; nothing but its manifest is read."""
        steps = [each for each in self._folder.steps() if each <= step]
        return self._folder.manifest(steps[-1]) if steps else None

    def _fill(self, manifest: Manifest) -> None:
        found = self._folder.part(manifest, self._name).beginning(PARAMETERS)
        for slot in self._arena.layout.slots:
            self._arena.parameter(slot)[...] = found[slot.name]

    def restore(self) -> None:
        where = self._synchronizer.all_gather(np.array([self.first, self.ahead], np.int64))[0]
        self.first, self.ahead = (int(each) for each in where)
        if self._at is not None or self.first == 0:
            return
        manifest = self._folder.manifest(self.first)
        if self._name in manifest.parts:
            set_random(self._folder.part(manifest, self._name).beginning(RANDOM))
        try:
            self._synchronizer.load_optimizer(optimizer_slices(self._folder, manifest))
        except ValueError as exc:
            raise CommitCorrupt(f"{self._folder.of_step(self.first)}: of the optimizer's state {exc}") from exc

    def after(self, step: int, epoch: int) -> None:
        self._writer.check()
        if step % self._every:
            return
        arrays = {RANDOM + name: array for name, array in random_arrays().items()}
        slices = self._synchronizer.optimizer_slices()
        arrays |= {OPTIMIZER + name: array for name, array in arrays_of(slices).items()}
        if self._synchronizer.rank > 0:
            self._writer.write(step, Part(arrays))
            return
        parameters = {slot.name: self._arena.parameter(slot).copy() for slot in self._arena.layout.slots}
        arrays |= {PARAMETERS + name: array for name, array in parameters.items()}
        self._writer.write(step, Part(arrays))
        nranks, servers = self._synchronizer.nranks, self._synchronizer.servers
        describe = partial(self._describe, step, epoch, lambda: sha256_of_parameters(parameters.items()))
        names = participants(nranks, servers)
        self._writer.complete(step, names, describe, keep=self._keep, timeout=self._timeout)

    def _describe(self, step: int, epoch: int, digest: Callable[[], str], parts: dict[str, PartEntry]) -> Manifest:
        slots = zip(self._arena.layout.slots, self._names, strict=True)
        return Manifest(
            scheme=self._synchronizer.scheme,
            nranks=self._synchronizer.nranks,
            servers=self._synchronizer.servers,
            step=step,
            epoch=epoch,
            ahead=self.ahead,
            layout=[SlotEntry(s.name, list(s.shape), s.start, s.dtype, name) for s, name in slots],
            length=self._arena.layout.length,
            job=self._job,
            parts=parts,
            parameters_sha256=digest(),
        )

    def finish(self) -> None:
        if self._synchronizer.rank > 0:
            self._writer.finish()
        self._synchronizer.all_gather(np.zeros(1, np.uint8))  # who could not write its part has said so
        self._writer.finish()

    def close(self) -> None:
        super().close()
        self._writer.close()
        self._folder.release()


def commits_of(config: TrainingConfig, synchronizer: Synchronizer, steps_per_epoch: Callable[[int], int]) -> Commits:
    """What the flags ask for.

    Args:
        steps_per_epoch: of a number of ranks.
    """
    if config.checkpoint_dir is None:
        return Commits(synchronizer)
    if synchronizer.mode != "sync":
        raise UsageError(f"--checkpoint-dir is for --mode sync (got {synchronizer.mode})")
    again = int(os.environ.get(RESTARTS_VARIABLE) or 0) > 0
    return KeptCommits(
        CommitFolder(config.checkpoint_dir),
        synchronizer,
        every=config.commit_every or EVERY,
        keep=config.keep or KEEP,
        resume=config.resume or again,
        anyhow=again,
        elastic=config.elastic,
        steps_per_epoch=steps_per_epoch,
        job={name: getattr(config, name) for name in SAME},
        timeout=config.timeout,
    )
