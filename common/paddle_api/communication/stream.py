"""What the members of a group do together, with Paddle's tensors: as the functions of paddle.distributed.stream."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import paddle

from common.paddle_api.communication.groups import Groups
from common.paddle_api.communication.point_to_point import PointToPoint
from common.paddle_api.communication.reduce_op import ReduceOp, name_of_op
from common.paddle_api.communication.tasks import Task
from common.paddle_api.communication.tensors import (
    Array,
    array_dtype,
    array_of,
    check_tensor,
    check_tensors,
    put_into,
)

__all__ = ["Stream"]

F = TypeVar("F", bound=Callable[..., Any])
DONE = Task()


def of_members(call: F) -> F:
    """With the group that is meant; where this rank is no member, a warning and nothing else."""

    @functools.wraps(call)
    def checked(self: Stream, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if given["use_calc_stream"] and not given["sync_op"]:
            raise RuntimeError(f"{call.__name__}: use_calc_stream can only be true with sync_op (got sync_op=False)")
        given["group"] = self._groups.member_of(call.__name__, given["group"])
        return None if given["group"] is None else call(*bound.args, **bound.kwargs)

    signature = inspect.signature(call)
    return checked  # type: ignore[return-value]


class Stream:
    """Every call is made by all members of `group` (None: all ranks), in the same order, with tensors of the same dtype
    and shape. It is carried out before it returns, also with sync_op=False, but for `recv`.

    Raises (every method):
        ValueError: an argument cannot be.
        ProtocolError: the ranks' calls or tensors differ.
        PeerLost, PeerStalled: a rank died, or does not take part; it is named.
    """

    def __init__(self, groups: Groups, point_to_point: PointToPoint) -> None:
        self._groups, self._point_to_point = groups, point_to_point

    @of_members
    def all_reduce(
        self,
        tensor: Any,
        op: int = ReduceOp.SUM,
        group: Any = None,
        sync_op: bool = True,
        use_calc_stream: bool = False,
    ) -> Task | None:
        """Replace a tensor by its sum (or max, min, product, mean) over members."""
        check_tensor("all_reduce", "tensor", tensor)
        put_into("all_reduce", tensor, exchange_of(group).all_reduce(array_of(tensor), name_of_op(op)))
        return DONE

    @of_members
    def reduce(
        self,
        tensor: Any,
        dst: int = 0,
        op: int = ReduceOp.SUM,
        group: Any = None,
        sync_op: bool = True,
        use_calc_stream: bool = False,
    ) -> Task | None:
        """As `all_reduce`, on rank `dst` only; the others keep their tensors."""
        check_tensor("reduce", "tensor", tensor)
        to = place_of("reduce", "dst", dst, group)
        found = exchange_of(group).reduce(array_of(tensor), name_of_op(op), to)
        if to == group.rank:
            put_into("reduce", tensor, found)
        return DONE

    def all_gather(
        self,
        tensor_or_tensor_list: Any,
        tensor: Any,
        group: Any = None,
        sync_op: bool = True,
        use_calc_stream: bool = False,
    ) -> Task | None:
        """Every member's tensor, in order, becomes the content of the list: of the tensors in it, or, if it is empty,
        of new ones; or of one tensor, side by side.

        Raises:
            RuntimeError: this rank is no member.
        """
        if group is not None and not group.is_member() and group.id != 0:
            raise RuntimeError("all_gather: this rank is no member of the group; only members may call it")
        return self._all_gather(tensor_or_tensor_list, tensor, group, sync_op, use_calc_stream)

    @of_members
    def _all_gather(self, outputs: Any, tensor: Any, group: Any, sync_op: bool, use_calc_stream: bool) -> Task:
        check_tensor("all_gather", "tensor", tensor)
        if not isinstance(outputs, paddle.Tensor):
            check_list("all_gather", "tensor_list", outputs, group.nranks)
        fill("all_gather", outputs, exchange_of(group).all_gather(array_of(tensor)), [tensor] * group.nranks)
        return DONE

    @of_members
    def gather(
        self,
        tensor: Any,
        gather_list: Any = None,
        dst: int = 0,
        group: Any = None,
        sync_op: bool = True,
        use_calc_stream: bool = False,
    ) -> Task | None:
        """As `all_gather`, on rank `dst` only."""
        check_tensor("gather", "tensor", tensor)
        to = place_of("gather", "dst", dst, group)
        if to == group.rank:
            check_list("gather", "gather_list", gather_list, group.nranks)
        elif gather_list is not None:
            warnings.warn("Specific `gather_list` is meaningless for rank which is not dst.", stacklevel=3)
        found = exchange_of(group).gather(array_of(tensor), to)
        if to == group.rank:
            fill("gather", gather_list, found, [tensor] * group.nranks)
        return DONE

    @of_members
    def scatter(
        self,
        tensor: Any,
        tensor_or_tensor_list: Any = None,
        src: int = 0,
        group: Any = None,
        sync_op: bool = True,
        use_calc_stream: bool = False,
    ) -> Task | None:
        """Give each member its tensor of the list of rank `src`, or its part of one tensor there."""
        check_tensor("scatter", "tensor", tensor)
        source, arrays = place_of("scatter", "src", src, group), []
        if source == group.rank:
            arrays = parts_of("scatter", "tensor_list", tensor_or_tensor_list, group.nranks)
            check_kinds("scatter", "tensor_list", arrays, [tensor] * group.nranks)
        elif tensor_or_tensor_list is not None:
            warnings.warn("Specific `tensor_or_tensor_list` is meaningless for rank which is not src.", stacklevel=3)
        put_into("scatter", tensor, exchange_of(group).scatter(arrays, kind_of(tensor), source))
        return DONE

    @of_members
    def reduce_scatter(
        self,
        tensor: Any,
        tensor_or_tensor_list: Any,
        op: int = ReduceOp.SUM,
        group: Any = None,
        sync_op: bool = True,
        use_calc_stream: bool = False,
    ) -> Task | None:
        """Reduce the members' lists (or tensors, of equal parts), and give each member its part of the result."""
        check_tensor("reduce_scatter", "tensor", tensor)
        arrays = parts_of("reduce_scatter", "tensor_list", tensor_or_tensor_list, group.nranks)
        check_kinds("reduce_scatter", "tensor_list", arrays, [tensor] * group.nranks)
        put_into("reduce_scatter", tensor, exchange_of(group).reduce_scatter(arrays, name_of_op(op)))
        return DONE

    @of_members
    def alltoall(
        self,
        out_tensor_or_tensor_list: Any,
        in_tensor_or_tensor_list: Any,
        group: Any = None,
        sync_op: bool = True,
        use_calc_stream: bool = False,
    ) -> Task | None:
        """Send each member its tensor of the list (or part of the tensor), and take what the members send."""
        outputs, inputs, nranks = out_tensor_or_tensor_list, in_tensor_or_tensor_list, group.nranks
        if isinstance(outputs, paddle.Tensor) != isinstance(inputs, paddle.Tensor):
            raise ValueError("alltoall: out and in must be both a Tensor or both a list of them (got one of each)")
        arrays = parts_of("alltoall", "in_tensor_list", inputs, nranks)
        if isinstance(outputs, paddle.Tensor):
            kinds = [(a.dtype, list(a.shape)) for a in parts_of("alltoall", "out_tensor", outputs, nranks)]
        else:
            check_list("alltoall", "out_tensor_list", outputs, nranks)
            kinds = [kind_of(each) for each in outputs or inputs]
        found = exchange_of(group).all_to_all(arrays, kinds)
        fill("alltoall", outputs, found, inputs)
        return DONE

    @of_members
    def alltoall_single(
        self,
        out_tensor: Any,
        in_tensor: Any,
        out_split_sizes: Any = None,
        in_split_sizes: Any = None,
        group: Any = None,
        sync_op: bool = True,
        use_calc_stream: bool = False,
    ) -> Task | None:
        """As `alltoall` of tensors, cut along their first dimension, perhaps unequally."""
        call, nranks = "alltoall_single", group.nranks
        check_tensor(call, "out_tensor", out_tensor)
        check_tensor(call, "in_tensor", in_tensor)
        arrays = cut(call, "in_split_sizes", array_of(in_tensor), in_split_sizes, nranks)
        into = array_of(out_tensor)
        rooms = cut(call, "out_split_sizes", into, out_split_sizes, nranks)
        found = exchange_of(group).all_to_all(arrays, [(into.dtype, room.shape) for room in rooms], call)
        for room, array in zip(rooms, found, strict=True):
            if (room.dtype, room.size) != (array.dtype, array.size):
                kind = f"{into.dtype} {list(room.shape)}, expected {array.dtype} {list(array.shape)}"
                raise ValueError(
                    f"{call}: this rank's part of out_tensor does not fit its part of in_tensor (got {kind})"
                )
            room[...] = array.reshape(room.shape)
        put_into(call, out_tensor, into)
        return DONE

    @of_members
    def broadcast(
        self, tensor: Any, src: int, group: Any = None, sync_op: bool = True, use_calc_stream: bool = False
    ) -> Task | None:
        """Replace a tensor by rank `src`'s."""
        check_tensor("broadcast", "tensor", tensor)
        source = place_of("broadcast", "src", src, group)
        found = exchange_of(group).broadcast(array_of(tensor), source)
        if source != group.rank:
            put_into("broadcast", tensor, found)
        return DONE

    def send(
        self, tensor: Any, dst: int = 0, group: Any = None, sync_op: bool = True, use_calc_stream: bool = False
    ) -> Task | None:
        """Send a tensor to rank `dst`, which need not wait for it yet."""
        check_stream("send", sync_op, use_calc_stream)
        return self._point_to_point.send(tensor, dst, group)

    def recv(
        self, tensor: Any, src: int = 0, group: Any = None, sync_op: bool = True, use_calc_stream: bool = False
    ) -> Task | None:
        """Replace a tensor by what rank `src` sends next; without sync_op when the task is waited for, or at once
        if it comes soon."""
        check_stream("recv", sync_op, use_calc_stream)
        if not sync_op:
            return self._point_to_point.receive_soon(tensor, src, group)
        if task := self._point_to_point.receive(tensor, src, group):
            task.wait()
        return task


def check_stream(call: str, sync_op: bool, use_calc_stream: bool) -> None:
    if use_calc_stream and not sync_op:
        raise RuntimeError(f"{call}: use_calc_stream can only be true with sync_op (got sync_op=False)")


def exchange_of(group: Any) -> Any:
    return group.process_group.exchange


def place_of(call: str, what: str, rank: int, group: Any) -> int:
    """Of a rank of the world in the group."""
    if rank not in group.ranks:
        raise ValueError(f"{call}: {what} must be a member of the group (got {rank}, expected one of {group.ranks})")
    place: int = group.ranks.index(rank)
    return place


def kind_of(tensor: Any) -> tuple[np.dtype[Any], list[int]]:
    return array_dtype(tensor), list(tensor.shape)


def check_list(call: str, what: str, tensors: Any, count: int) -> None:
    """Of a list for results: empty, or full."""
    if not isinstance(tensors, list):
        raise ValueError(
            f"{call}: {what} must be a list (got {type(tensors).__name__}, expected an empty list or Tensors)"
        )
    if tensors and len(tensors) != count:
        expected = f"be empty or hold a tensor for each of {count} ranks"
        raise ValueError(f"{call}: {what} must {expected} (it holds {len(tensors)})")
    for tensor in tensors:
        check_tensor(call, f"each of {what}", tensor)


def parts_of(call: str, what: str, tensors: Any, count: int) -> list[Array]:
    """What a list holds for each rank, or the equal parts of one tensor."""
    if not isinstance(tensors, paddle.Tensor):
        return [array_of(each) for each in check_tensors(call, what, tensors, count)]
    check_tensor(call, what, tensors)
    return cut(call, what, array_of(tensors), None, count)


def cut(call: str, what: str, array: Array, sizes: Any, count: int) -> list[Array]:
    """Parts along the first dimension, as views."""
    rows = array.shape[0] if array.ndim else 0
    if sizes is None or len(sizes) == 0:
        if array.ndim == 0 or rows % count:
            raise ValueError(
                f"{call}: {what}: the first dimension must be a multiple of the number of ranks "
                f"(got shape {list(array.shape)}, expected a multiple of {count})"
            )
        sizes = [rows // count] * count
    if len(sizes) != count or min(sizes) < 0 or sum(sizes) != rows:
        expected = f"{count} sizes that make {rows}"
        raise ValueError(f"{call}: {what} do not fit the tensor (got {list(sizes)}, expected {expected})")
    ends = np.cumsum(sizes)
    return [array[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def check_kinds(call: str, what: str, arrays: list[Array], tensors: list[Any]) -> None:
    """That arrays have the dtypes of tensors, and as many elements."""
    for array, tensor in zip(arrays, tensors, strict=True):
        if array.dtype != array_dtype(tensor) or array.size != math.prod(tensor.shape):
            got = f"{array.dtype} {list(array.shape)}, expected {array_dtype(tensor)} {list(tensor.shape)}"
            raise ValueError(f"{call}: each of {what} must be like tensor (got {got})")


def fill(call: str, outputs: Any, arrays: list[Array], like: Any) -> None:
    """Put arrays into a list of tensors, which may be empty, or side by side into one tensor."""
    if isinstance(outputs, paddle.Tensor):
        check_tensor(call, "the output", outputs)
        put_into(call, outputs, np.concatenate([array.reshape(-1) for array in arrays]))
        return
    if not outputs:
        outputs.extend(paddle.empty_like(each) for each in like)
    for tensor, array in zip(outputs, arrays, strict=True):
        put_into(call, tensor, array)
