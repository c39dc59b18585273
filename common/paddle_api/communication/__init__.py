"""Groups of ranks and what they tell each other, by the names of `paddle.distributed`; known without Paddle."""

from __future__ import annotations

__all__ = ["COMMUNICATION", "STREAM"]

STREAM = (  # of paddle.distributed.stream, too
    "all_gather",
    "all_reduce",
    "alltoall",
    "alltoall_single",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)
COMMUNICATION = (
    *STREAM,
    "P2POp",
    "all_gather_object",
    "all_to_all",
    "barrier",
    "batch_isend_irecv",
    "broadcast_object_list",
    "get_backend",
    "get_group",
    "irecv",
    "is_available",
    "isend",
    "new_group",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "stream",
    "wait",
)
