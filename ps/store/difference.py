"""The update of mode geo, whose trainers have the optimizer: servers add up by how much parameters have changed."""

from __future__ import annotations

from common.tensors.optimizers import Optimizer
from ps.store.relaxed_store import RelaxedStore
from ps.store.shards import shard_of_bucket

__all__ = ["AddDifference"]


class AddDifference:
    """A trainer's parameters have changed by `gradients` since it read the servers'. Added is a part in `nranks` of
    that, so that all trainers together move the parameters by the mean of their changes."""

    def __init__(self, store: RelaxedStore, _: Optimizer | None = None) -> None:
        self._runs = []
        for bucket in store.buckets:
            part, base = shard_of_bucket(store.shard, bucket), store.shard.start
            run = slice(part.start - base, part.stop - base)
            self._runs.append((store.parameters[run].view(bucket.dtype), store.gradients[run].view(bucket.dtype)))
        self._nranks = store.nranks

    def step(self, learning_rate: float, used: bytes = b"") -> None:  # noqa: ARG002 - the trainer has used them
        for parameters, difference in self._runs:
            parameters += difference * parameters.dtype.type(1 / self._nranks)
