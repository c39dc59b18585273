"""Replicas: parameters that every rank updates for itself must stay the same on all."""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_64_intdigest

from common.arena import FloatArray
from common.errors import ReplicasDiffer
from common.synchronizer import Synchronizer

__all__ = ["check_replicas"]


def check_replicas(parameters: FloatArray, synchronizer: Synchronizer, when: str) -> None:
    """Compare all ranks' parameters, by a digest of 64 bits; all ranks call it, between steps.

    Args:
        when: for the message, as "after step 3".

    Raises:
        ReplicasDiffer: on every rank, naming those whose parameters are not rank 0's.
    """
    digest = np.array([xxh3_64_intdigest(parameters.view(np.uint8).data)], np.uint64).view(np.int64)
    first, *others = synchronizer.all_gather(digest)[:, 0].tolist()
    if differ := [str(rank) for rank, other in enumerate(others, 1) if other != first]:
        whose = f"those of rank{'s' * (len(differ) > 1)} {', '.join(differ)}"
        raise ReplicasDiffer(
            f"{when} the parameters of rank 0 differ from {whose}: each rank updates its own copy; give all the same "
            "parameters and optimizer, and processors that round alike (docs/concepts.md)"
        )
