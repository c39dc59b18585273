"""The one interface between training and a scheme: what a parameter server and a ring have in common."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from common.commit.plan import NO_COMMITS, CommitPlan
from common.commit.slices import Slice
from common.errors import ProtocolError
from common.sync.guard import UNGUARDED, Guard
from common.sync.messenger import ALONE, Messenger
from common.sync.trace import NO_SERVERS, NO_TRACE, Trace, TracedServers
from common.system.memory import aligned_empty
from common.tensors.arena import Arena, FloatArray
from common.tensors.optimizers import Optimizer
from common.tensors.reduction_of_any import reduce_in_order

__all__ = ["ServerOptimizer", "Synchronizer", "kind_of"]

WORDS_OF_KIND = 16  # before an array that is gathered to be reduced, which is aligned then


class Synchronizer(ABC):
    """Keeps the arenas of all ranks equal, step by step, or as far apart as `mode` says.

    Each step: the caller writes gradients into the arena, calls `mark_ready` once for every bucket as its gradients
    become final (in any order, from any one thread), then `finish`. From `mark_ready` on a bucket's gradients belong to
    the synchronizer; when `finish` returns, gradients and parameters belong to the caller again.

    Six methods carry a scheme: `attach`, `mark_ready`, `finish`, `all_gather`, `another` and `close`. The others are
    hints and services that do nothing special unless a scheme overrides them.

    A context manager: leaving it closes it, and after an exception tells the other ranks why. Every blocking
    method has a deadline (`timeout`, seconds) and raises a PeerError naming the rank or server at fault.
    """

    scheme: str  # "local", "ps" or "ring"
    backend: str  # what carries the bytes: "none", "grpc", "shm", "tcp"
    rank: int
    nranks: int
    servers: int = 0
    mode: str = "sync"  # how far ranks may run apart, by name: "ssp:2", "async", "geo:4"
    staleness: int | None = 0  # how many steps a rank may be ahead of the slowest; None: any number
    server_optimizer: ServerOptimizer | None = None  # where servers can make the update of a user's program
    traced_servers: TracedServers = NO_SERVERS  # who is asked for a trace, beside the ranks
    trace: Trace = NO_TRACE  # is told what is done when; may be set before `attach`
    commits: CommitPlan = NO_COMMITS  # which steps of the built-in training are kept; may be set before `attach`
    messenger: Messenger = ALONE  # to the other ranks, not within a step
    guard: Guard = UNGUARDED  # looks at gradients before they are handed over; may be set before `attach`
    can_rejoin: bool = False  # whether `leave` and `rejoin` work
    own_optimizer: bool = False  # whether no two ranks keep the same of the optimizer's state

    def empty(self, count: int) -> FloatArray:
        """An uninitialised 1-D float32 array that the scheme can reach without a copy; for arenas."""
        array: FloatArray = aligned_empty(count)
        return array

    @abstractmethod
    def attach(self, arena: Arena, optimizer: Optimizer | None) -> None:
        """Agree with the other ranks on layout and optimizer, and give every arena rank 0's parameters.

        Blocks until all ranks have called it. The arena must outlive the synchronizer. Without an optimizer `finish`
        leaves the mean gradients in the arena, for the caller to make the update (or see ServerOptimizer).

        Raises:
            LayoutMismatch: ranks disagree; the message names the first difference.
        """

    def announce(self, learning_rate: float) -> None:  # noqa: B027 - nothing to begin with it
        """The step about to begin ends with `finish` at this learning rate: for a scheme whose update can begin beside
        backward. Parameters stay as they are until `finish`. Before the first `mark_ready`; may be left out.

        Raises (`finish`):
            ValueError: it was called with another one.
        """

    @abstractmethod
    def mark_ready(self, bucket: int) -> None:
        """Bucket number `bucket` of the arena holds this rank's final gradients of the step. Never blocks."""

    def launch_in(self, order: Sequence[int]) -> None:  # noqa: B027 - a scheme that starts nothing has no order
        """Start buckets in this order from now on, not by number; between steps, and the same on all ranks."""

    @abstractmethod
    def finish(self, learning_rate: float) -> None:
        """End the step: blocks until the arena's parameters are those after the global update, or, where there is no
        optimizer, the arena's gradients are the mean over ranks.

        Buckets not marked are taken as final now. After an update the contents of the gradient buffer are undefined.

        Raises:
            NonFiniteGradient: the guard of some rank refuses its gradients; no parameter was changed.
        """

    def settle(self) -> None:  # noqa: B027 - where ranks are always equal there is nothing to settle
        """After the last step: blocks until all ranks have called it, and their arenas hold the same parameters, to
        which every rank's every step has contributed."""

    def optimizer_slices(self, *, everyone: bool = False) -> list[Slice]:  # noqa: ARG002 - servers have it
        """Copies of what this rank has to keep of the optimizer's state, which it alone has, or, where all have the
        same, as rank 0; between steps.

        Args:
            everyone: also where another rank has the same.
        """
        return []

    def load_optimizer(self, slices: Sequence[Slice]) -> None:  # noqa: B027 - servers find theirs by themselves
        """Go on from the state that all ranks and servers had kept; after `attach`, before the first step.

        Raises:
            ValueError: it does not cover the arena.
            UsageError: it is another optimizer's, which may be seen in the first step only.
        """

    @abstractmethod
    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Every rank's `values` (equal shape and dtype), stacked in rank order; not within a step."""

    def all_reduce(self, array: npt.NDArray[Any], op: str) -> None:
        """Replace `array` (contiguous), on every rank, by the "sum", "mean" or "max" over ranks, in the canonical
        order; not within a step.

        Raises:
            ProtocolError: the ranks' ops, dtypes or shapes differ.
        """
        rows = self.gather_alike(array, f"all_reduce ({op})")
        reduce_in_order(rows, array.reshape(-1), op, start=0, total=array.size)

    def gather_alike(self, array: npt.NDArray[Any], call: str) -> list[npt.NDArray[Any]]:
        """As `all_gather`, of an array (contiguous) whose dtype, shape and call must be the same on all ranks; 1-D.

        Raises:
            ProtocolError: they are not.
        """
        mine = np.full(WORDS_OF_KIND, kind_of(array, call), np.uint32)
        try:
            everyone = self.all_gather(np.concatenate([mine.view(np.uint8), array.reshape(-1).view(np.uint8)]))
        except ProtocolError as exc:
            given = f"{call} with {array.dtype} {list(array.shape)}"
            raise ProtocolError(
                f"rank {self.rank} called {given}, another rank another call or another size; all ranks must make the "
                f"same calls in the same order, with equal dtypes and shapes ({exc})"
            ) from exc
        for rank, kind in enumerate(everyone[:, : mine.nbytes].view(np.uint32)[:, 0]):
            if kind != mine[0]:
                raise ProtocolError(
                    f"rank {rank} made another call than this rank, {call} of {array.dtype} {list(array.shape)}, or "
                    "gave another dtype or shape; all ranks must make the same calls in the same order"
                )
        return [row[mine.nbytes :].view(array.dtype) for row in everyone]

    def broadcast(self, array: npt.NDArray[Any], root: int) -> None:
        """Replace `array` (contiguous, of four-byte words), on every rank, by rank `root`'s; not within a step."""
        array[...] = self.all_gather(array)[root]

    def leave(self, reason: str) -> None:  # noqa: B027 - see `can_rejoin`
        """Close the group, which is broken, and tell the others why; what is attached counts no longer."""

    def rejoin(self, rendezvous: str) -> None:  # noqa: B027 - see `can_rejoin`
        """Join the group that comes after it, and meets there; then `attach` again."""

    @abstractmethod
    def another(self) -> Synchronizer:
        """A synchronizer of the same group for a further model, with an arena of its own. Called by all ranks, in the
        same order, not within a step. Closing it ends that model's synchronisation only; closing this one ends all."""

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """Leave the group and release everything held; a `reason` tells the others that this rank failed.

        Idempotent. Never raises for what the other ranks did.
        """

    def __enter__(self) -> Synchronizer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close("" if kind is None else f"{kind.__name__}: {error}")


def kind_of(array: npt.NDArray[Any], call: str) -> int:
    """A number, 0..2^32-1, that is another one for another call, dtype or shape (apart from dimensions of 1)."""
    return zlib.crc32(f"{call} {array.dtype.name} {[n for n in array.shape if n != 1]}".encode())


class ServerOptimizer(ABC):
    """What servers do for a user's program, whose optimizer is known only when it steps.

    After the synchronizer's `attach(arena, None)` and `configure` each step ends with its `finish`, which averages, or
    with `update`.
    """

    choice: str = "auto"  # who updates, as the user says: "server", "trainer", or "auto": servers if they can
    updates: int = 0  # that servers have made, those of earlier groups included
    looks_later: bool = False  # a guard that only warns is asked by `look_back`, not when gradients are pushed

    @abstractmethod
    def keep(self, updates: int, step: int) -> None:
        """Have servers keep the optimizer's state after each update from now on, so that the next group can go back to
        one of the last two; called by all ranks, before `configure`.

        Args:
            updates: that there have been; of a group that comes after another one, to which of them servers go back.
            step: after which the ranks go on.
        """

    @abstractmethod
    def configure(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        """Name the optimizer, and each slot of the arena as its state's keys do ("": it is no parameter)."""

    @abstractmethod
    def update(self, learning_rate: float, *, used: bytes, again: bool = False, replaced: bool = False) -> None:
        """End the step: blocks until the arena's parameters are those after the global update.

        Args:
            used: a byte for each slot, not zero if this rank's backward reached it. What no rank reached stays.
            again: no bucket was marked; the average that the last `finish` left is used.
            replaced: the arena's parameters were changed since the last step: rank 0's are used.

        Raises:
            LayoutMismatch: ranks disagree on an argument or on the optimizer.
        """

    @abstractmethod
    def look_back(self) -> None:
        """Have the guard look at gradients that were pushed, or will be, in this step, and are in the arena still."""

    @abstractmethod
    def state(self) -> dict[str, npt.NDArray[Any]]:
        """The state of the servers' optimizer by Paddle's keys; any rank may ask, between steps."""

    @abstractmethod
    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from a state as `state` gave it; called by all ranks, rank 0's counts."""
