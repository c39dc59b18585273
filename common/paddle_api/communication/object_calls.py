"""What the members of a group tell each other in Python's objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from common.paddle_api.communication.groups import Groups
from common.paddle_api.communication.objects import Codec
from common.paddle_api.communication.stream import place_of

__all__ = ["ObjectCalls"]

BYTES = np.dtype(np.uint8)


class ObjectCalls:
    """Plain types, containers, NumPy's arrays and Paddle's tensors arrive as what they were; other objects are refused.

    Args:
        codec: gives what makes bytes of them.
        before: called before anything is received from a rank in a group, for what is to be received earlier.

    Raises (every method):
        ValueError: an argument cannot be.
        UsageError: an object cannot be sent without pickle, and that was not asked for.
        ProtocolError: the ranks' calls differ, or what came is no object.
    """

    def __init__(self, groups: Groups, codec: Callable[[], Codec], before: Callable[[Any, int], None]) -> None:
        self._groups, self._codec, self._before = groups, codec, before

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Append every member's object to the list, in order."""
        if (group := self._groups.member_of("all_gather_object", group)) is None:
            return
        data = self._bytes_of(obj)
        kinds = [(BYTES, None)] * group.nranks
        found = group.process_group.exchange.all_to_all([data] * group.nranks, kinds, "all_gather_object")
        object_list.extend(self._codec().decode(each.data) for each in found)

    def broadcast_object_list(self, object_list: list[Any], src: int, group: Any = None) -> None:
        """Replace what the list holds by what rank `src`'s does, which is as long."""
        if (group := self._groups.member_of("broadcast_object_list", group)) is None:
            return
        source, call = (
            place_of("broadcast_object_list", "src", src, group),
            f"broadcast_object_list ({len(object_list)})",
        )
        arrays = [self._bytes_of(list(object_list))] * group.nranks if source == group.rank else []
        found = group.process_group.exchange.scatter(arrays, (BYTES, None), source, call)
        if source != group.rank:
            object_list[:] = self._codec().decode(found.data)

    def scatter_object_list(
        self, out_object_list: list[Any], in_object_list: list[Any] | None = None, src: int = 0, group: Any = None
    ) -> None:
        """Make rank `src`'s object for this rank the content of `out_object_list`."""
        if (group := self._groups.member_of("scatter_object_list", group)) is None:
            return
        source, arrays = place_of("scatter_object_list", "src", src, group), []
        if source == group.rank:
            if in_object_list is None or len(in_object_list) != group.nranks:
                got = "None" if in_object_list is None else str(len(in_object_list))
                what = "in_object_list must hold an object for each rank"
                raise ValueError(f"scatter_object_list: {what} (got {got}, expected {group.nranks})")
            arrays = [self._bytes_of(each) for each in in_object_list]
        found = group.process_group.exchange.scatter(arrays, (BYTES, None), source, "scatter_object_list")
        out_object_list[:] = [self._codec().decode(found.data)]

    def send_object_list(
        self, object_list: list[Any], dst: int | None = None, group: Any = None, dst_in_group: int | None = None
    ) -> None:
        """Send the objects of a list to rank `dst`."""
        if (group := self._with_objects("send_object_list", object_list, group)) is None:
            return
        to = other_of("send_object_list", "dst", dst, dst_in_group, group)
        group.process_group.between_two.send(
            to, f"send_object_list ({len(object_list)})", self._bytes_of([*object_list])
        )

    def recv_object_list(
        self, object_list: list[Any], src: int | None = None, group: Any = None, src_in_group: int | None = None
    ) -> None:
        """Replace the objects of a list by those that rank `src` sends, as many."""
        if (group := self._with_objects("recv_object_list", object_list, group)) is None:
            return
        source, call = (
            other_of("recv_object_list", "src", src, src_in_group, group),
            f"send_object_list ({len(object_list)})",
        )
        self._before(group, source)
        found = group.process_group.between_two.receive(source, call, BYTES, None)
        object_list[:] = self._codec().decode(found.data)

    def _with_objects(self, call: str, object_list: list[Any], group: Any) -> Any:
        if not object_list:
            raise ValueError(f"{call}: object_list must hold an object (got {object_list!r}, expected a list of some)")
        return self._groups.member_of(call, group)

    def _bytes_of(self, value: Any) -> np.ndarray[Any, Any]:
        return np.frombuffer(self._codec().encode(value), BYTES)


def other_of(call: str, what: str, rank: int | None, place: int | None, group: Any) -> int:
    """The other rank, given by its number in the world or in the group; by default 0."""
    if rank is not None and place is not None:
        raise ValueError(f"{call}: give {what} or {what}_in_group, not both (got {rank} and {place})")
    if place is not None and not 0 <= place < group.nranks:
        raise ValueError(f"{call}: {what}_in_group must be in 0..{group.nranks - 1} (got {place})")
    chosen: int = (rank or 0) if place is None else group.ranks[place]
    others = [r for r in group.ranks if r != group.ranks[group.rank]]
    if chosen not in others:
        raise ValueError(f"{call}: {what} must be another member of the group (got {chosen}, expected one of {others})")
    return chosen
