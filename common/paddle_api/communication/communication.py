"""Groups and communication in one process: the functions of `paddle.distributed`, with Paddle's signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.paddle_api.communication.groups import Groups
from common.paddle_api.communication.object_calls import ObjectCalls
from common.paddle_api.communication.objects import Codec
from common.paddle_api.communication.paddles_maps import NO_MAPS, Maps
from common.paddle_api.communication.point_to_point import P2POp, PointToPoint
from common.paddle_api.communication.reduce_op import ReduceOp
from common.paddle_api.communication.stream import Stream
from common.paddle_api.communication.tasks import Task
from common.sync.synchronizer import Synchronizer

__all__ = ["Communication"]


class Communication:
    """See Stream for what all calls have in common, and ObjectCalls for those of objects.

    Args:
        joined: gives the synchronizer, and joins the group first if need be.
        pickles: whether objects of other than plain types may be pickled.
        maps: of the groups of this process.
    """

    P2POp: Any

    def __init__(self, joined: Callable[[], Synchronizer], pickles: Callable[[], bool], maps: Maps = NO_MAPS) -> None:
        self._groups = Groups(joined, lambda: self.stream, maps)
        self._point_to_point = PointToPoint(self._groups)
        self.stream = Stream(self._groups, self._point_to_point)
        objects = ObjectCalls(self._groups, lambda: Codec(pickles=pickles()), self._point_to_point.finish)
        self.all_gather_object = objects.all_gather_object
        self.broadcast_object_list = objects.broadcast_object_list
        self.scatter_object_list = objects.scatter_object_list
        self.send_object_list = objects.send_object_list
        self.recv_object_list = objects.recv_object_list
        self.new_group, self.get_group = self._groups.new, self._groups.get
        self.P2POp = type("P2POp", (P2POp,), {"groups": self._groups, "__doc__": P2POp.__doc__})

    def is_available(self) -> bool:
        return True

    def get_backend(self, group: Any = None) -> str:
        """Which of Paddle's libraries this group stands in for: "GLOO", or "NCCL" on GPUs.

        Raises:
            RuntimeError: this rank is no member.
        """
        if (found := self._groups.member_of("get_backend", group)) is None:
            raise RuntimeError("get_backend: this rank is no member of the group")
        name: str = found.process_group.name()
        return name

    def destroy(self, group: Any) -> None:
        """A group but that of all ranks; called by all."""
        self._groups.destroy(group)
        self._point_to_point.forget(group)

    def left(self) -> None:
        """This process has left the group of all ranks."""
        self._groups.forget()

    def barrier(self, group: Any = None) -> None:
        """Block until every member has called it."""
        if group is not None and group.id != 0 and not group.is_member():
            return
        self._groups.member_of("barrier", group).process_group.exchange.barrier()

    def wait(self, tensor: Any, group: Any = None, use_calc_stream: bool = True) -> None:
        """Block until what was begun with a tensor is done."""
        self._point_to_point.wait_for(tensor)

    def all_reduce(self, tensor: Any, op: int = ReduceOp.SUM, group: Any = None, sync_op: bool = True) -> Task | None:
        """Replace a tensor by its sum (or max, min, product, mean) over members."""
        return self.stream.all_reduce(tensor, op, group, sync_op)

    def reduce(
        self, tensor: Any, dst: int, op: int = ReduceOp.SUM, group: Any = None, sync_op: bool = True
    ) -> Task | None:
        """As `all_reduce`, on rank `dst` only."""
        return self.stream.reduce(tensor, dst, op, group, sync_op)

    def all_gather(self, tensor_list: list[Any], tensor: Any, group: Any = None, sync_op: bool = True) -> Task | None:
        """Every member's tensor, in order, becomes the content of the list."""
        return self.stream.all_gather(tensor_list, tensor, group, sync_op)

    def gather(
        self, tensor: Any, gather_list: list[Any] | None = None, dst: int = 0, group: Any = None, sync_op: bool = True
    ) -> Task | None:
        """As `all_gather`, on rank `dst` only."""
        return self.stream.gather(tensor, gather_list, dst, group, sync_op)

    def scatter(
        self, tensor: Any, tensor_list: Any = None, src: int = 0, group: Any = None, sync_op: bool = True
    ) -> Task | None:
        """Give each member its tensor of the list of rank `src`."""
        return self.stream.scatter(tensor, tensor_list, src, group, sync_op)

    def reduce_scatter(
        self,
        tensor: Any,
        tensor_list: list[Any],
        op: int = ReduceOp.SUM,
        group: Any = None,
        sync_op: bool = True,
    ) -> Task | None:
        """Reduce the members' lists, and give each member its tensor of the result."""
        return self.stream.reduce_scatter(tensor, tensor_list, op, group, sync_op)

    def alltoall(
        self, out_tensor_list: list[Any], in_tensor_list: list[Any], group: Any = None, sync_op: bool = True
    ) -> Task | None:
        """Send each member its tensor of the list, and take what the members send."""
        return self.stream.alltoall(out_tensor_list, in_tensor_list, group, sync_op)

    all_to_all = alltoall

    def alltoall_single(
        self,
        out_tensor: Any,
        in_tensor: Any,
        in_split_sizes: list[int] | None = None,
        out_split_sizes: list[int] | None = None,
        group: Any = None,
        sync_op: bool = True,
    ) -> Task | None:
        """As `alltoall`, of one tensor that is cut along its first dimension."""
        return self.stream.alltoall_single(out_tensor, in_tensor, out_split_sizes, in_split_sizes, group, sync_op)

    def broadcast(self, tensor: Any, src: int, group: Any = None, sync_op: bool = True) -> Task | None:
        """Replace a tensor by rank `src`'s."""
        return self.stream.broadcast(tensor, src, group, sync_op)

    def send(self, tensor: Any, dst: int = 0, group: Any = None, sync_op: bool = True) -> Task | None:
        """Send a tensor to rank `dst`, which need not wait for it yet."""
        return self.stream.send(tensor, dst, group, sync_op)

    def recv(self, tensor: Any, src: int = 0, group: Any = None, sync_op: bool = True) -> Task | None:
        """Replace a tensor by what rank `src` sends next."""
        return self.stream.recv(tensor, src, group, sync_op)

    def isend(self, tensor: Any, dst: int, group: Any = None) -> Task | None:
        return self.send(tensor, dst, group, sync_op=False)

    def irecv(self, tensor: Any, src: int | None = None, group: Any = None) -> Task | None:
        """As `recv`, at once if it comes soon; else when the task is waited for, or anything that is received after it
        from that rank."""
        return self.recv(tensor, 0 if src is None else src, group, sync_op=False)

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Task] | None:
        """Begin all of them; the tasks are to be waited for.

        Raises:
            RuntimeError: it is no list of some P2POp.
        """
        if not isinstance(p2p_op_list, list) or not p2p_op_list or not all(isinstance(x, P2POp) for x in p2p_op_list):
            raise RuntimeError(f"batch_isend_irecv: expected a list of some P2POp (got {type(p2p_op_list).__name__})")
        if self._groups.member_of("batch_isend_irecv", p2p_op_list[0].group) is None:
            return None
        receive = self._point_to_point.receive  # which does not wait: what is sent may stand behind it
        calls: dict[str, Callable[..., Task | None]] = {"isend": self.isend, "irecv": receive}
        begun = [calls[each.op.__name__](each.tensor, each.peer, each.group) for each in p2p_op_list]
        return [task for task in begun if task is not None]
