"""A server's part of the commits: what its optimizer keeps of its shard, after the steps that the trainers say.

Where it is kept is the server's own affair: whoever started it named the folder. Trainers say after which steps, and
from which commit the training goes on; rank 0 keeps the parameters, and sends them when it goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from common.commit.folder import CommitFolder
from common.commit.parts import Part
from common.commit.plan import NO_COMMITS, CommitPlan
from common.commit.resuming import OPTIMIZER, optimizer_slices
from common.commit.slices import arrays_of
from common.commit.writer import Writer
from common.errors import CommitCorrupt, CommitFailed, GradSyncError, UsageError
from common.network.gradsync_pb2 import Register
from ps.store.store import Store

__all__ = ["ServerCommits"]


class ServerCommits:
    """
    Args:
        folder: of the commits; None: this server keeps none.
        index: of this server.
        fail: is called with what could not be written.
    """

    def __init__(self, folder: Path | None, index: int, fail: Callable[[GradSyncError], None]) -> None:
        self._folder = CommitFolder(folder) if folder else None
        self._index, self._fail = index, fail
        self._plan, self._kept = NO_COMMITS, 0  # the last step that was kept
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

    def begin(self, store: Store) -> None:
        """Training begins, or goes on.

        Raises:
            CommitCorrupt, UsageError: not with what was kept.
        """
        self._kept = self._plan.first
        if self._folder is None or not self._plan.every:
            return
        self._writer = Writer(self._folder, f"server-{self._index}", on_error=self._tell)
        if step := self._plan.first:
            try:
                store.load_optimizer(optimizer_slices(self._folder, self._folder.manifest(step)))
            except ValueError as exc:
                raise CommitCorrupt(f"{self._folder.of_step(step)}: of the optimizer's state {exc}") from exc

    def after(self, steps: int, store: Store) -> None:
        """So many steps of this server's have ended. Blocks for the copy, and while the commit before is written.

        Raises:
            CommitFailed: that could not be written.
        """
        step = self._plan.first + steps
        if self._writer is None or step == self._kept or not self._plan.is_due(step):
            return
        self._kept = step
        arrays = arrays_of([store.optimizer_slice()])
        self._writer.write(step, Part({OPTIMIZER + name: array for name, array in arrays.items()}))

    def close(self) -> None:
        """What is being written is written."""
        if self._writer:
            self._writer.close()

    def _tell(self, error: CommitFailed) -> None:
        """On the writer's thread, for which the group may be waiting with its lock."""
        threading.Thread(target=self._fail, args=(error,), name="gradsync-failure", daemon=True).start()
