"""What a server keeps of a user's program: what its optimizer holds of the shard after each of the last two updates, in
memory that outlives the server, once trainers have asked for it.

Trainers count updates, not steps: how many of these a step of the program's makes is the program's affair, and between
updates an optimizer holds what it held. A copy is kept before any trainer hears of the update, so that the one to which
all trainers can go back is among the last two, as long as a step makes one at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.commit.kept_parts import KeptParts
from common.commit.parts import Part, from_buffers, to_buffers
from common.errors import ProtocolError, RecoveryFailed
from common.network.gradsync_pb2 import Keep
from common.system.next_epoch import note_going_on
from common.tensors.parts import Accumulator
from ps.store.update_for_program import UpdateByParameter

__all__ = ["ProgramBoundaries"]


class ProgramBoundaries:
    """
    Args:
        memory: of the copies; None: none is kept.
        index: of this server.
    """

    def __init__(self, memory: KeptParts | None, index: int) -> None:
        self._memory, self._index = memory, index
        self._asked: Keep | None = None  # by the trainer that was first
        self._first = self._kept = 0  # updates before the first of this group, and at the last copy
        self.to_load: Sequence[Accumulator] = ()  # once the optimizer is named

    def keep(self, rank: int, keep: Keep, updates: UpdateByParameter) -> None:
        """A trainer wants copies from now on; in a group that comes after another one, of which there are copies, the
        optimizer goes on from the one that it names.

        Raises:
            RecoveryFailed: there is no such copy.
            ProtocolError: another trainer has said something else.
        """
        if self._asked is not None:
            if (keep.updates, keep.step) != (self._asked.updates, self._asked.step):
                raise ProtocolError(
                    f"rank {rank} goes on after {keep.updates} updates, at step {keep.step}, another trainer after "
                    f"{self._asked.updates}, at step {self._asked.step}; give all trainers the same program"
                )
            return
        self._asked = keep
        if self._memory is None:
            return
        there = self._memory.steps()
        if keep.updates not in (there or [0]):
            raise RecoveryFailed(
                f"server {self._index} has not kept what there was after update {keep.updates:,}, to which all go "
                f"back, but after {' and '.join(f'{each:,}' for each in there) or 'none'}"
            )
        self._first = keep.updates
        if not there:
            self._write(self._memory, keep.updates, updates)
            return
        self._kept = keep.updates
        self._memory.forget_after(keep.updates)
        self.to_load = accumulators_in(from_buffers(self._memory.read(keep.updates)))
        note_going_on(keep.step, keep.step)

    def after_update(self, updates: UpdateByParameter) -> None:
        """There may have been one, of which nobody has heard yet. Blocks for the copy."""
        made = self._first + updates.made
        if self._memory is not None and self._asked is not None and made > self._kept:
            self._write(self._memory, made, updates)

    def _write(self, memory: KeptParts, made: int, updates: UpdateByParameter) -> None:
        self._kept = made
        memory.write(made, to_buffers(part_of(updates.state() or ())))


def part_of(state: Sequence[Accumulator]) -> Part:
    """What a copy has of such a state."""
    places = {each.key: [each.slot, each.size, each.first] for each in state}
    return Part({each.key: each.values for each in state}, {"places": places})


def accumulators_in(part: Part) -> list[Accumulator]:
    """The state of which `part_of` made this."""
    places = part.state["places"].items()
    return [Accumulator(key, slot, size, first, part.arrays[key]) for key, (slot, size, first) in places]
