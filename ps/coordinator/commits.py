"""What a server keeps of a training: what its optimizer holds of its shard, in commits after the steps that the
trainers say, and at each step boundary in memory that outlives it.

Where it is kept is the server's own affair: whoever started it named the folder. Trainers say after which steps, and
after which step the training goes on; they keep the parameters, and rank 0 sends them when it goes on.

A boundary is kept before any trainer hears that its step has ended. So a server has the one to which all trainers can
go back among its last two (common/sync/boundaries.py), whoever dies, and whenever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from common.commit.folder import CommitFolder
from common.commit.kept_parts import KeptParts
from common.commit.parts import Part, from_buffers, to_buffers
from common.commit.plan import NO_COMMITS, CommitPlan
from common.commit.resuming import OPTIMIZER, optimizer_slices
from common.commit.slices import arrays_of, slices_in
from common.commit.writer import Writer
from common.errors import CommitCorrupt, CommitFailed, GradSyncError, RecoveryFailed, UsageError
from common.network.gradsync_pb2 import Register
from common.system.next_epoch import is_mended, note_going_on
from ps.store.store import Store

__all__ = ["ServerCommits"]


class ServerCommits:
    """
    Args:
        folder: of the commits; None: this server keeps none.
        index: of this server.
        fail: is called with what could not be written.
        memory: of the last two step boundaries; None: they are not kept.
    """

    def __init__(
        self,
        folder: Path | None,
        index: int,
        fail: Callable[[GradSyncError], None],
        memory: KeptParts | None = None,
    ) -> None:
        self._memory = memory
        self._folder = CommitFolder(folder) if folder else None
        self._index, self._fail = index, fail
        self._plan, self._kept, self._step = NO_COMMITS, 0, 0  # the last step that was kept in a commit, in memory
        self._writer: Writer | None = None

    def plan(self, rank: int, register: Register) -> None:
        """What a trainer wants to be kept.

        Raises:
            UsageError: this server has no folder for it.
        """
        if register.commit_every and self._folder is None:
            raise UsageError(
                f"rank {rank} wants commits, but server {self._index} has no folder for its part; start it with the "
                "--checkpoint-dir of the trainers"
            )
        if rank == 0:
            self._plan = CommitPlan(register.commit_every, register.first_step)
        if register.mode or not register.HasField("optimizer"):  # not in step, or of a program (program_boundaries.py)
            self._memory = None

    def begin(self, store: Store) -> None:
        """Training begins, or goes on.

        Raises:
            CommitCorrupt, UsageError, RecoveryFailed: not with what was kept.
        """
        step = self._kept = self._step = self._plan.first
        if self._folder is not None and self._plan.every:
            self._writer = Writer(self._folder, f"server-{self._index}", on_error=self._tell)
        if self._memory is not None and step in self._memory.steps():
            self._go_back(self._memory, step, store)
        elif step:
            self._resume(step, store)
        if self._memory is not None and not self._memory.steps():
            self._keep(self._memory, step, store)
            if is_mended():
                note_going_on(step, step)

    def _resume(self, step: int, store: Store) -> None:
        if self._folder is None or not self._plan.every:
            raise RecoveryFailed(
                f"server {self._index} has not kept the boundary of step {step:,}, to which all go back"
            )
        try:
            store.load_optimizer(optimizer_slices(self._folder, self._folder.manifest(step)))
        except ValueError as exc:
            raise CommitCorrupt(f"{self._folder.of_step(step)}: of the optimizer's state {exc}") from exc

    def _go_back(self, memory: KeptParts, step: int, store: Store) -> None:
        """To where all trainers are; a commit of that step may have been under way."""
        memory.forget_after(step)
        store.load_optimizer(slices_in(from_buffers(memory.read(step)).beginning(OPTIMIZER)))
        if step and self._plan.is_due(step):
            self._write(step, store)
        note_going_on(step, step)

    def before_results(self, steps: int, store: Store) -> None:
        """So many steps of this server's have ended, of the last of which nobody has heard yet. Blocks for the copy."""
        step = self._plan.first + steps
        if self._memory is not None and step > self._step:
            self._keep(self._memory, step, store)

    def _keep(self, memory: KeptParts, step: int, store: Store) -> None:
        self._step = step
        memory.write(step, to_buffers(part_of(store)))

    def after(self, steps: int, store: Store) -> None:
        """So many steps of this server's have ended. Blocks for the copy, and while the commit before is written.

        Raises:
            CommitFailed: that could not be written.
        """
        step = self._plan.first + steps
        if self._writer is None or step == self._kept or not self._plan.is_due(step):
            return
        self._kept = step
        self._write(step, store)

    def _write(self, step: int, store: Store) -> None:
        if self._writer is not None:
            self._writer.write(step, part_of(store))

    def close(self) -> None:
        """What is being written is written."""
        if self._writer:
            self._writer.close()

    def _tell(self, error: CommitFailed) -> None:
        """On the writer's thread, for which the group may be waiting with its lock."""
        threading.Thread(target=self._fail, args=(error,), name="gradsync-failure", daemon=True).start()


def part_of(store: Store) -> Part:
    """What its optimizer holds now."""
    arrays = arrays_of([store.optimizer_slice()])
    return Part({OPTIMIZER + name: array for name, array in arrays.items()})
