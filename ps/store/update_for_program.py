"""The updates of a user's program, whose optimizer is known only when it steps, and whose parameters it may change."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import ProtocolError
from common.tensors.arena import FloatArray, Layout
from common.tensors.optimizers import Optimizer
from common.tensors.parts import Accumulator, Part, parts_of
from common.tensors.updater import NoUpdate, StatefulUpdater, make_part_updater
from ps.store.step_state import StepState

__all__ = ["UpdateByParameter"]


class UpdateByParameter:
    """Parameter by parameter, so that those which no backward has reached stay as they are."""

    def __init__(self, step: StepState) -> None:
        self._step = step
        self._of_parts: StatefulUpdater | None = None  # once configured
        self._parts: dict[int, Part] = {}  # by slot
        self.made = 0  # updates

    def configure(self, optimizer: Optimizer, layout: Layout, names: Sequence[str]) -> None:
        """Later updates are this optimizer's; `names`: each slot's, with which its state's keys begin.

        Raises:
            UsageError: the optimizer cannot be had here.
        """
        step, shard = self._step, self._step.shard
        parts = parts_of(layout, names, shard.start, shard.stop)
        self._parts = {part.slot: part for part in parts}
        gradients = step.contributions.padded_gradients
        self._of_parts = make_part_updater(optimizer, step.padded_parameters, gradients, parts)

    def replace(self, rank: int, epoch: int, step: int, start: int, data: FloatArray) -> None:
        """Take parameters that the program has given other values, as StepState.replace."""
        self._step.replace(rank, epoch, step, start, data)

    def apply(self) -> None:
        """Update the whole shard by its averaged gradients, as the step's ending says; the next step begins."""
        self._step.update(self._of_parts or NoUpdate())
        self.made += 1

    def state(self) -> list[Accumulator] | None:
        """What the optimizer keeps; None before there is one."""
        return self._of_parts.state() if self._of_parts else None

    def load(self, state: Sequence[Accumulator]) -> None:
        """Have the optimizer go on from such a state.

        Raises:
            ProtocolError: there is no optimizer, or a run does not fit its parameter.
        """
        if self._of_parts is None:
            raise ProtocolError("optimizer state was sent before an optimizer was named")
        for each in state:
            part, run = self._parts.get(each.slot), (each.size, each.first, each.values.size)
            if part is None or run not in ((1, 0, 1), (part.size, part.first, part.count)):
                raise ProtocolError(f"optimizer state {each.key[:80]!r}, of size, start and count {run}, does not fit")
        self._of_parts.load(state)
