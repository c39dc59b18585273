"""What a group of any size does at its start, counted: of the code that chooses neighbours, without processes."""

from __future__ import annotations

from collections import deque

from benchmarks.records.scale import AtStart
from collective.choice import topology_of
from collective.membership.overlay import children, neighbours, within
from common.network.gradsync_pb2 import JoinReply

__all__ = ["at_start"]

ADDRESS = f"192.168.100.100 50000|gradsync-{'f' * 16}|{'f' * 32}"  # as joining.py tells it: TCP, Unix, host


def at_start(nranks: int) -> AtStart:
    """Of ranks that run on one host."""
    topology = topology_of("tcp", "auto", 0, [""] * nranks)
    whole = range(nranks)
    around = len(neighbours(0, nranks, whole)), len(neighbours(0, nranks, (), topology.linked))
    return AtStart(
        nranks=nranks,
        joins=nranks - 1,
        reply_bytes=JoinReply(addresses=[ADDRESS] * nranks, token=bytes(16), notes=[b""] * nranks).ByteSize(),
        connections_shm=around[0],
        connections_tcp=around[1] + len(topology.linked),
        all_with_all=2 * (nranks - 1),
        steps=steps_to_all(nranks),
        passed_on=max(len(children(index, 0, nranks)) for index in whole),
    )


def steps_to_all(nranks: int) -> int:
    """How often a word from rank 0 is passed on until all know it; from any other rank it is the same."""
    steps, ahead = {0: 0}, deque([0])
    while ahead:
        here = ahead.popleft()
        for there in within(here, nranks) - steps.keys():
            steps[there] = steps[here] + 1
            ahead.append(there)
    return max(steps.values())
