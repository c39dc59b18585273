"""What the members of a group do together, with NumPy's arrays, over a messenger.

All send first and then receive: who sends waits for nobody but for room on the way. Reductions are made in the
canonical order, over the members in the order of their ranks.

With n members and an array of B bytes each rank sends: all_gather, alltoall (n-1) B in all; all_reduce 2 (n-1)/n B,
its chunks reduced by one rank each; reduce, gather B; broadcast, scatter (n-1) B by one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.paddle_api.communication.post import Post
from common.paddle_api.communication.tensors import Array
from common.sync.synchronizer import Synchronizer
from common.tensors.buckets import chunk_bounds
from common.tensors.reduction_of_any import is_of_gradients, reduce_in_order

__all__ = ["Exchange"]

Kind = tuple[np.dtype[Any], Sequence[int]]  # dtype and shape


class Exchange:
    """One member's part. Every method is called by all members, with arrays that are contiguous.

    Args:
        ranks: of the members in the world; `me` and all places are indices of these.
        synchronizer: if all ranks are members: some of it goes the scheme's own way then.

    Raises (every method):
        ProtocolError: the members' calls, dtypes or shapes differ.
        PeerLost, PeerStalled: a member died, or does not take part.
    """

    def __init__(self, post: Post, ranks: Sequence[int], me: int, synchronizer: Synchronizer | None) -> None:
        self._post, self._ranks, self._me, self._synchronizer = post, ranks, me, synchronizer
        self._others = [(me + i) % len(ranks) for i in range(1, len(ranks))]  # not all to the same one at first

    def barrier(self) -> None:
        self.all_gather(np.zeros(1, np.uint8), "barrier")

    def all_gather(self, array: Array, call: str = "all_gather") -> list[Array]:
        """Of every member, in order."""
        if self._synchronizer:
            return [row.reshape(array.shape) for row in self._synchronizer.gather_alike(array, call)]
        return self.all_to_all([array] * len(self._ranks), [(array.dtype, array.shape)] * len(self._ranks), call)

    def all_to_all(self, arrays: Sequence[Array], kinds: Sequence[Kind], call: str = "alltoall") -> list[Array]:
        """Send each member its array; what the members sent to this one, which is of these kinds."""
        for other in self._others:
            self._post.send(self._ranks[other], call, arrays[other])
        found = list(arrays)
        for other in reversed(self._others):
            found[other] = self._post.receive(self._ranks[other], call, *kinds[other])
        return found

    def gather(self, array: Array, to: int, call: str = "gather") -> list[Array]:
        """Of every member, for the one at that place; nothing for the others."""
        if self._me != to:
            self._post.send(self._ranks[to], call, array)
            return []
        found = [array] * len(self._ranks)
        for other in self._others:
            found[other] = self._post.receive(self._ranks[other], call, array.dtype, array.shape)
        return found

    def scatter(self, arrays: Sequence[Array], kind: Kind, source: int, call: str = "scatter") -> Array:
        """This member's of the arrays of the one at place `source`; the others give none."""
        if self._me != source:
            return self._post.receive(self._ranks[source], call, *kind)
        for other in self._others:
            self._post.send(self._ranks[other], call, arrays[other])
        return arrays[self._me]

    def broadcast(self, array: Array, source: int) -> Array:
        kind = (array.dtype, array.shape)
        return self.scatter([array] * len(self._ranks), kind, source, "broadcast")

    def all_reduce(self, array: Array, op: str) -> Array:
        """The reduction, of the array's shape; the array is spoilt."""
        call, flat = f"all_reduce ({op}, of {[n for n in array.shape if n != 1]} in all)", array.reshape(-1)
        if self._synchronizer and is_of_gradients(array.dtype, op):
            self._synchronizer.all_reduce(array, op)
            return array
        bounds = chunk_bounds(flat.size, len(self._ranks))
        start, stop = bounds[self._me]
        whole = self.all_to_all([flat[a:b] for a, b in bounds], [(flat.dtype, [stop - start])] * len(bounds), call)
        chunk = np.empty(stop - start, flat.dtype)
        reduce_in_order(whole, chunk, op, start=start, total=flat.size)
        chunks = self.all_to_all([chunk] * len(bounds), [(flat.dtype, [b - a]) for a, b in bounds], call)
        return np.concatenate(chunks).reshape(array.shape)

    def reduce(self, array: Array, op: str, to: int) -> Array:
        """The reduction for the member at that place; for the others their array."""
        sources = self.gather(array, to, f"reduce ({op})")
        if not sources:
            return array
        out = np.empty(array.size, array.dtype)
        reduce_in_order([x.reshape(-1) for x in sources], out, op, start=0, total=array.size)
        return out.reshape(array.shape)

    def reduce_scatter(self, arrays: Sequence[Array], op: str) -> Array:
        """This member's part of the reduction of the members' arrays, which are of one shape, set side by side."""
        kinds = [(arrays[0].dtype, arrays[0].shape)] * len(self._ranks)
        sources = self.all_to_all(arrays, kinds, f"reduce_scatter ({op})")
        size = arrays[0].size
        out = np.empty(size, arrays[0].dtype)
        start, total = self._me * size, len(self._ranks) * size
        reduce_in_order([x.reshape(-1) for x in sources], out, op, start=start, total=total)
        return out.reshape(arrays[0].shape)
