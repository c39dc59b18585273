"""Which store a consistency mode needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from common.system.memory import aligned_empty
from common.tensors.arena import FloatArray
from common.tensors.buckets import Bucket
from ps.store.difference import AddDifference
from ps.store.modes import SYNC, Mode
from ps.store.relaxed_store import AsyncStore, SspStore
from ps.store.shards import Shard
from ps.store.store import Store
from ps.store.sync_store import SyncStore

__all__ = ["make_store"]

# Words that are averaged and updated at a time. 1 MiB: the L2 cache of a core may hold it.
PIECE = 1 << 18
SENT_PIECE = 1 << 17  # a message between hosts: answered as soon as all have sent it
NEAR_PIECE = 1 << 20  # a message within a host: Python takes 0.1 ms for each piece that was sent, whatever its size


def make_store(
    mode: Mode,
    shard: Shard,
    buckets: Sequence[Bucket],
    nranks: int,
    *,
    epoch: int = 0,
    sent: bool = False,
    near: bool = False,
    empty: Callable[[int], FloatArray] = aligned_empty,
    helper: ThreadPoolExecutor | None = None,
) -> Store:
    """The store of that mode; arguments as of StepState, and:

    Args:
        sent: gradients come over connections, and are not read where trainers have them.
        near: those are all within this host.
    """
    if mode == SYNC:
        piece = (NEAR_PIECE if near else SENT_PIECE) if sent else PIECE
        return SyncStore(shard, buckets, nranks, epoch=epoch, empty=empty, piece=piece, helper=helper)
    if mode.staleness is not None:
        return SspStore(shard, buckets, nranks, staleness=mode.staleness, epoch=epoch, helper=helper)
    if mode.name == "geo":
        return AsyncStore(shard, buckets, nranks, epoch=epoch, helper=helper, make_updater=AddDifference)
    return AsyncStore(shard, buckets, nranks, epoch=epoch, helper=helper)
