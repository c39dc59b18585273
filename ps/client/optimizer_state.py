"""The optimizer that servers have of a user's program: named, and its state gathered and loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import ProtocolError, UsageError
from common.network.gradsync_pb2 import Configure, Keep, StateRequest, TrainerMessage
from common.tensors.arena import Layout
from common.tensors.optimizers import Optimizer
from common.tensors.parts import Accumulator, is_number, parts_of, slot_of_key
from ps.client.servers import Servers
from ps.planes.protobuf_messages import optimizer_message, state_of, state_pieces
from ps.store.shards import Shard

__all__ = ["OptimizerState"]

Array = npt.NDArray[Any]
Placed = tuple[str, int, Array]  # of one accumulator: key, slot, values


class OptimizerState:
    """Spread over the servers, each of which keeps it for its shard."""

    def __init__(self, servers: Servers, rank: int, epoch: int) -> None:
        self._servers, self._rank, self._epoch = servers, rank, epoch
        self._layout = Layout((), 0)
        self._names: list[str] = []  # of each slot, with which its state's keys begin

    def configure(self, layout: Layout, optimizer: Optimizer, names: Sequence[str]) -> None:
        """See Client.configure."""
        self._layout, self._names = layout, list(names)
        named = optimizer_message(optimizer)
        message = Configure(epoch=self._epoch, rank=self._rank, optimizer=named, names=names)
        self._servers.send_all(TrainerMessage(configure=message))

    def keep(self, updates: int, step: int) -> None:
        """See Client.keep."""
        self._servers.send_all(TrainerMessage(keep=Keep(epoch=self._epoch, updates=updates, step=step)))

    def gather(self) -> dict[str, Array]:
        """See Client.optimizer_state."""
        inboxes = [session.inbox for session in self._servers.sessions]
        for session in self._servers.sessions:
            request = StateRequest(epoch=self._epoch, number=session.inbox.expect_state())
            session.send([TrainerMessage(state_request=request)])
        self._servers.wait(lambda session: session.inbox.has_state, "asking for the optimizer's state")
        found: dict[str, Array] = {}
        for inbox in inboxes:
            for run in state_of(inbox.take_state()):
                self._check(run)
                whole = found.setdefault(run.key, np.zeros(run.size, run.values.dtype))
                whole[run.first : run.first + run.values.size] = run.values
        return {key: self._shaped(key, found[key]) for key in self._in_paddles_order(found)}

    def load(self, state: Mapping[str, Array]) -> None:
        """See Client.load_optimizer_state."""
        placed = [self._place(key, value) for key, value in state.items()]
        if self._rank != 0:
            return
        for session in self._servers.sessions:
            mine = state_pieces(self._runs_in(session.shard, placed), epoch=self._epoch)
            session.send(TrainerMessage(state=piece) for piece in mine)

    def _check(self, run: Accumulator) -> None:
        """Before memory is made for the whole of it.

        Raises:
            ProtocolError: it belongs to no parameter, or is of another size.
        """
        index = slot_of_key(run.key, self._names)
        sizes = (1,) if index is None else (1, self._layout.slots[index].size)
        if index is None or run.size not in sizes or run.first + run.values.size > run.size:
            raise ProtocolError(f"a server sent optimizer state {run.key[:80]!r} that fits no parameter")

    def _place(self, key: str, value: Array) -> Placed:
        slots, index = self._layout.slots, slot_of_key(key, self._names)
        if index is None:
            raise UsageError(f"the optimizer state has {key}, which belongs to no parameter of this model")
        if value.size not in (1, slots[index].size):
            raise UsageError(
                f"the optimizer state's {key} has {value.size} elements, its parameter {slots[index].size}"
            )
        return key, index, value.reshape(-1)

    def _runs_in(self, shard: Shard, placed: Sequence[Placed]) -> list[Accumulator]:
        """What of them belongs to a shard: numbers as they are, of arrays the part."""
        parts = {part.slot: part for part in parts_of(self._layout, self._names, *astuple(shard))}
        runs = []
        for key, index, value in placed:
            if (part := parts.get(index)) is not None:
                whole = is_number(key) or value.size != part.size
                run = value if whole else value[part.first : part.first + part.count]
                runs.append(Accumulator(key, index, value.size, 0 if whole else part.first, run))
        return runs

    def _shaped(self, key: str, whole: Array) -> Array:
        slot = self._layout.slots[slot_of_key(key, self._names) or 0]
        return whole if is_number(key) else whole.reshape(slot.shape)

    def _in_paddles_order(self, keys: Iterable[str]) -> list[str]:
        """One kind of accumulator after the other, each in the order of the parameters."""
        placed = [(key, slot_of_key(key, self._names) or 0) for key in keys]
        kinds = list(dict.fromkeys(key[len(self._names[slot]) :] for key, slot in placed))
        placed.sort(key=lambda each: (kinds.index(each[0][len(self._names[each[1]]) :]), each[1]))
        return [key for key, _ in placed]
