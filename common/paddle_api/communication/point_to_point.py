"""From one member of a group to another: `send` at once, `irecv` when it is waited for, or at once if it comes soon."""

from __future__ import annotations

from collections import deque
from typing import Any

from common.paddle_api.communication.groups import Groups
from common.paddle_api.communication.tasks import Task
from common.paddle_api.communication.tensors import array_dtype, array_of, check_tensor, put_into

__all__ = ["P2POp", "PointToPoint", "Received"]

SOON_S = 1.0


class Received(Task):
    """A tensor that another rank sends: carried out when it is waited for, or anything that is received after it from
    that rank."""

    def __init__(self, tensor: Any, source: int, group: Any, before: deque[Received]) -> None:
        self.tensor, self.source, self.group, self.done = tensor, source, group, False
        self._queue = before  # in the order posted, this one too
        before.append(self)

    def wait(self, timeout: Any = None) -> bool:
        while not self.done:
            self._queue[0]._carry_out()
        return True

    @property
    def is_next(self) -> bool:
        """Whether nothing else is to be received from that rank before."""
        return self._queue[0] is self

    def comes(self, seconds: float) -> bool:
        """Whether it begins to, within so many seconds."""
        found: bool = self.group.process_group.between_two.comes(self.source, seconds)
        return found

    def _carry_out(self) -> None:
        tensor, post = self.tensor, self.group.process_group.between_two
        found = post.receive(self.source, "send", array_dtype(tensor), tensor.shape)
        self._queue.popleft()
        self.done = True
        put_into("recv", tensor, found)


class PointToPoint:
    """What is under way between this rank and others."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._awaited: dict[tuple[Any, int], deque[Received]] = {}  # by group and source
        self._expects = True  # that what is to be received comes soon

    def send(self, tensor: Any, dst: int, group: Any) -> Task | None:
        check_tensor("send", "tensor", tensor)
        if (group := self._with_other("send", "dst", dst, group)) is None:
            return None
        group.process_group.between_two.send(dst, "send", array_of(tensor))
        return Task()

    def receive(self, tensor: Any, src: int, group: Any) -> Received | None:
        check_tensor("recv", "tensor", tensor)
        if (group := self._with_other("recv", "src", src, group)) is None:
            return None
        return Received(tensor, src, group, self._awaited.setdefault((group, src), deque()))

    def receive_soon(self, tensor: Any, src: int, group: Any) -> Received | None:
        """Likewise, for a program that reads what `irecv` receives without waiting for it, as it may where Paddle's
        groups are Gloo's: there `irecv` blocks. Here it does for SOON_S at most, until that was once in vain: of a
        program whose ranks ask before they send."""
        received = self.receive(tensor, src, group)
        if received and self._expects and received.is_next:
            self._expects = received.comes(SOON_S)
            if self._expects:
                received.wait()
        return received

    def finish(self, group: Any, src: int) -> None:
        """All that was to be received from that rank before."""
        queue = self._awaited.get((group, src), ())
        while queue:
            queue[0].wait()

    def wait_for(self, tensor: Any) -> None:
        """What is to be received into this tensor."""
        for queue in self._awaited.values():
            for each in [each for each in queue if each.tensor is tensor]:
                each.wait()

    def forget(self, group: Any) -> None:
        """What is to be received in a group that is no more."""
        for key in [key for key in self._awaited if key[0] is group]:
            del self._awaited[key]

    def _with_other(self, call: str, what: str, rank: int, group: Any) -> Any:
        if (group := self._groups.member_of(call, group)) is None:
            return None
        others = [r for r in group.ranks if r != self._groups.world.rank]
        if rank not in others:
            raise ValueError(
                f"{call}: {what} must be another member of the group (got {rank}, expected one of {others})"
            )
        return group


class P2POp:
    """One of the operations of `batch_isend_irecv`: as paddle.distributed.P2POp."""

    groups: Groups  # set where the class is bound

    def __init__(self, op: Any, tensor: Any, peer: int, group: Any = None) -> None:
        if getattr(op, "__name__", "") not in ("isend", "irecv"):
            raise RuntimeError(f"P2POp: op must be paddle.distributed.isend or paddle.distributed.irecv (got {op!r})")
        self.op, self.tensor, self.peer = op, tensor, peer
        self.group = self.groups.world if group is None else group
