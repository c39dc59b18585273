"""Fleet's and paddle.distributed's names over the ring."""

from __future__ import annotations

from collective.group import connect
from collective.synchronizer import RingSynchronizer
from common.launch.placement import Placement
from common.network.rpc import check_bind_host, host_of
from common.paddle_api.surface import Surface
from common.sync.synchronizer import Synchronizer

__all__ = ["join", "surface"]


def join(placement: Placement, synchronizer: type[RingSynchronizer] = RingSynchronizer) -> Synchronizer:
    if not placement.rendezvous.startswith("unix"):
        check_bind_host(host_of(placement.rendezvous), insecure=placement.insecure)
    group = connect(
        placement.rank,
        placement.nranks,
        placement.rendezvous,
        placement.backend,
        algorithm=placement.algorithm,
        checksum=placement.checksum,
        device="cpu",
        nccl_binding=placement.nccl_binding,
        timeout=placement.timeout,
    )
    return synchronizer(group, overlap=placement.overlap)


surface = Surface("collective", join)
