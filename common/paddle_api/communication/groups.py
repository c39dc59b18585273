"""The groups of a process: Paddle's own class of a group, with our exchange behind each."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from paddle.distributed.communication.group import Group

from common.paddle_api.communication.exchange import Exchange
from common.paddle_api.communication.paddles_maps import NO_MAPS, Maps
from common.paddle_api.communication.part_synchronizer import PartSynchronizer
from common.paddle_api.communication.post import Post
from common.paddle_api.communication.tasks import Task
from common.sync.synchronizer import Synchronizer

__all__ = ["Groups", "ProcessGroup"]

FIRST_CHANNEL = 1 << 16  # lower ones are free for others; two for each group
PADDLES_OWN = 9  # numbers that Paddle keeps, so that the first group made is 10
BETWEEN_TWO = 1  # the second one, for send and recv, which need no order with what all members do


class ProcessGroup:
    """What carries a group's calls; not Paddle's own, so that it has few of its functions.

    Args:
        calls: gives the functions of `paddle.distributed.stream`.
    """

    def __init__(self, synchronizer: Synchronizer, ranks: Sequence[int], number: int, calls: Callable[[], Any]) -> None:
        self._ranks, self._calls = ranks, calls
        self.group: Any = None  # Paddle's, of which this is the process_group
        me, messenger = synchronizer.rank, synchronizer.messenger
        self._name = "NCCL" if synchronizer.backend.startswith("nccl") else "GLOO"  # who takes the same tensors
        self._size, self._rank = len(ranks), ranks.index(me)
        channel = FIRST_CHANNEL + 2 * number
        whole = synchronizer if len(ranks) == synchronizer.nranks else None
        self.exchange = Exchange(Post(messenger, ranks, channel), ranks, self._rank, whole)
        self.between_two = Post(messenger, ranks, channel + BETWEEN_TWO)
        self.synchronizer = whole or PartSynchronizer(self.exchange, ranks, self._rank, synchronizer.backend)

    def name(self) -> str:
        """As Paddle calls what it has for these tensors, for programs ask: "GLOO", or "NCCL" on GPUs."""
        return self._name

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def broadcast(self, tensor: Any, src: int, sync_op: bool = True) -> Any:
        """Replace a tensor by that of the group's member `src`, which is counted within the group; gives a task."""
        return self._calls().broadcast(tensor, self._ranks[src], self.group, sync_op=False)

    def all_reduce(self, tensor: Any, op: Any, sync_op: bool = True) -> Any:
        """As `paddle.distributed.all_reduce`; gives a task. Paddle's own function hands over an operation of its core,
        of the same number."""
        return self._calls().all_reduce(tensor, int(op), self.group, sync_op=False)

    allreduce = all_reduce

    def barrier(self) -> Any:
        """Block until every member has called it; gives a task."""
        self.exchange.barrier()
        return Task()

    def __getattr__(self, name: str) -> Any:
        """What Paddle's own functions ask of a group, where they are called although a program has imported ours."""
        raise AttributeError(
            f"a group of GradSync has no {name!r}: Paddle's own functions cannot use it; call those of the import, as "
            f"in dist.{name}, or start without --no-install"
        )


class Groups:
    """By their numbers; 0 is that of all ranks.

    Args:
        joined: gives the synchronizer, and joins the group first if need be.
        calls: as of ProcessGroup.
        maps: are kept up to date.
    """

    def __init__(self, joined: Callable[[], Synchronizer], calls: Callable[[], Any], maps: Maps = NO_MAPS) -> None:
        self._joined, self._calls, self._maps = joined, calls, maps
        self._of: Synchronizer | None = None  # the groups
        self._groups: dict[int, Any] = {}
        self._made = 0

    def new(
        self,
        ranks: list[int] | None = None,
        backend: str | None = None,
        timeout: datetime.timedelta = datetime.timedelta(seconds=1800),
        nccl_comm_init_option: int = 0,
        nccl_config: Any = None,
    ) -> Any:
        """As paddle.distributed.new_group: called by all ranks, in the same order. Who carries the calls, and how long
        it waits, is the launcher's affair.

        Raises:
            ValueError: they are not different ranks of the world.
        """
        nranks = self.world.nranks
        chosen = sorted(range(nranks) if ranks is None else ranks)
        if len({*chosen}) != len(chosen) or not {*chosen} <= {*range(nranks)}:
            raise ValueError(f"new_group: ranks must be different ones of 0..{nranks - 1} (got {ranks})")
        self._made += 1
        return self._add(chosen, PADDLES_OWN + self._made)

    def get(self, id: int = 0) -> Any:  # Paddle's name
        """The group of that number; None, with a warning, if there is none."""
        found = self.world if id == 0 else self._groups.get(id)
        if found is None:
            warnings.warn(f"Group {id} is not initialized.", stacklevel=3)
        return found

    def destroy(self, group: Any) -> None:
        """Forget a group but that of all ranks.

        Raises:
            ValueError: it is not one of these.
        """
        if not self._knows(group):
            raise ValueError(f"destroy_process_group: no such group (got {group!r}, expected one of new_group's)")
        self._maps.drop(self._groups.pop(group.id))

    def forget(self) -> None:
        """All of them: this process has left."""
        for group in reversed(self._groups.values()):
            self._maps.drop(group)
        self._groups.clear()
        self._of = None

    @property
    def world(self) -> Any:
        """Of all ranks."""
        synchronizer = self._joined()
        if synchronizer is not self._of:  # joined anew, after it was left
            self.forget()
            self._of, self._made = synchronizer, 0
            self._add([*range(synchronizer.nranks)], 0)
        return self._groups[0]

    def member_of(self, call: str, group: Any) -> Any:
        """The group that a call is made on; None, with a warning, if this rank is no member.

        Raises:
            ValueError: it is no group of ours, or destroyed.
        """
        world = self.world
        if group is None:
            return world
        alone = getattr(group, "nranks", 0) == 1  # has no members, whoever made it
        if not alone and not self._knows(group):
            raise ValueError(
                f"{call}: no such group (got {group!r}, expected one of new_group, not destroyed, or None)"
            )
        if group.process_group is None or (not group.is_member() and group is not world):
            warnings.warn(f"Current global rank {world.rank} is not in group {group.name}", stacklevel=4)
            return None
        return group

    def _knows(self, group: Any) -> bool:
        return any(group is each for each in self._groups.values())

    def _add(self, ranks: list[int], number: int) -> Any:
        synchronizer = self._of
        assert synchronizer is not None
        alone = len(ranks) == 1 and number > 0  # in Paddle a group of one has no members
        is_member = synchronizer.rank in ranks and not alone
        carrier = ProcessGroup(synchronizer, ranks, number, self._calls) if is_member else None
        rank = ranks.index(synchronizer.rank) if is_member else -1
        group = Group(rank, number, ranks, pg=carrier, name=f"_default_pg{number or ''}")
        if carrier:
            carrier.group = group
        self._groups[number] = group
        self._maps.add(group)
        return group
