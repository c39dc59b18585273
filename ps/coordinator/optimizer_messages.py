"""A user's program, whose optimizer is known only when it steps: it is named, and its state goes to and fro."""

from __future__ import annotations

from common.errors import LayoutMismatch, ProtocolError
from common.network.gradsync_pb2 import Chunk, Configure, Keep, ServerMessage, StatePiece, StateRequest
from common.tensors.arena import FloatArray
from ps.coordinator.checks import check_states
from ps.coordinator.frozen_or_slow import Silence
from ps.coordinator.liveness import Members
from ps.coordinator.program_boundaries import ProgramBoundaries
from ps.coordinator.registration import Registration
from ps.planes.protobuf_messages import data_of, optimizer_of, state_of, state_pieces
from ps.store.store import Store

__all__ = ["ProgramOptimizer"]


class ProgramOptimizer:
    """What trainers say of their program's optimizer.

    Args:
        boundaries: keep its state, if they ask for it.
    """

    def __init__(
        self, members: Members, silence: Silence, registration: Registration, boundaries: ProgramBoundaries
    ) -> None:
        self._members, self._silence, self._registration = members, silence, registration
        self._boundaries = boundaries
        self._named: Configure | None = None  # the optimizer, by the trainer that was first
        self._configured: set[int] = set()
        self._loading: list[StatePiece] = []  # pieces of an optimizer state that rank 0 is sending
        self._loading_bytes = 0  # that these take

    @property
    def named(self) -> bool:
        """Whether some trainer has named the optimizer."""
        return self._named is not None

    def check_named(self, rank: int, step: int) -> None:
        """
        Raises:
            ProtocolError: the trainer wants an update, and has never named an optimizer.
        """
        if not self._registration.agreed.HasField("optimizer") and rank not in self._configured:
            raise ProtocolError(f"rank {rank} asked for an update at step {step} without naming an optimizer")

    def configure(self, rank: int, configure: Configure) -> None:
        """Trainers name the optimizer before their first update."""
        store = self._registration.store_for(rank)
        self._members.check_epoch(configure.epoch, rank)
        optimizer, layout = optimizer_of(configure), self._registration.layout()
        updates = None if self._registration.agreed.HasField("optimizer") else store.program
        fits = configure.rank == rank and len(configure.names) == len(layout.slots)
        if optimizer is None or updates is None or not fits:
            raise ProtocolError(f"rank {rank} sent a wrong configuration at step {self._members.steps}")
        if self._named is None:
            self._named = configure
            updates.configure(optimizer, layout, list(configure.names))
            if state := self._boundaries.to_load:
                updates.load(state)
        mine = self._named
        if (mine.optimizer, list(mine.names)) != (configure.optimizer, list(configure.names)):
            theirs = optimizer_of(mine) if mine.optimizer != configure.optimizer else "other parameter names"
            raise LayoutMismatch(
                f"rank {mine.rank} and rank {rank} disagree on the optimizer: {theirs} against {optimizer}; "
                "make the same optimizer on all ranks"
            )
        self._configured.add(rank)

    def keep(self, rank: int, keep: Keep) -> None:
        """Trainers want the optimizer's state to be kept from now on."""
        updates = self._registration.store_for(rank).program
        self._members.check_epoch(keep.epoch, rank)
        if self._registration.agreed.HasField("optimizer") or updates is None or rank in self._configured:
            raise ProtocolError(f"rank {rank} sent an unexpected keep message at step {self._members.steps}")
        self._boundaries.keep(rank, keep, updates)

    def before_results(self, store: Store) -> None:
        """An update may have been made, of which nobody has heard yet. Blocks while its state is copied."""
        if store.program is not None:
            self._boundaries.after_update(store.program)

    def replace_parameters(self, rank: int, chunk: Chunk, words: FloatArray | None) -> None:
        """The program has given its parameters other values; the next piece of them."""
        updates = self._registration.store_for(rank).program
        assert updates is not None  # where an optimizer was named
        self._members.check_epoch(chunk.epoch, rank)
        data = data_of(chunk) if words is None else words
        updates.replace(rank, chunk.epoch, chunk.step, chunk.start, data)
        self._silence.still_alive()

    def load_state(self, rank: int, piece: StatePiece) -> None:
        """A piece of an optimizer state to go on from."""
        self._members.check_epoch(piece.epoch, rank)
        updates = self._registration.store_for(rank).program
        if rank != 0 or updates is None or self._named is None:
            raise ProtocolError(
                f"rank {rank} sent optimizer state at step {self._members.steps}, expected it from rank 0 only"
            )
        shard, slots = self._registration.store_for(rank).shard, len(self._named.names)
        self._loading_bytes = check_states(self._loading_bytes, piece, shard, slots)
        self._loading.append(piece)
        self._silence.still_alive()
        if piece.last:
            state, self._loading, self._loading_bytes = state_of(self._loading), [], 0
            updates.load(state)

    def send_state(self, rank: int, request: StateRequest) -> None:
        """A trainer asks for the optimizer's state."""
        self._members.check_epoch(request.epoch, rank)
        updates = self._registration.store_for(rank).program
        state = updates.state() if updates else None
        if state is None:
            raise ProtocolError(
                f"rank {rank} asked for optimizer state at step {self._members.steps}, but there is no optimizer"
            )
        answer = state_pieces(state, epoch=self._members.epoch, request=request.number)
        self._members.queues[rank].put(ServerMessage(state=piece) for piece in answer)
