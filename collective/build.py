"""The algorithm of a group whose ranks are connected, over the transport or the memory that it needs."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from collective.algorithm import Algorithm
from collective.algorithms.by_size import BySize
from collective.algorithms.hierarchical import HierarchicalAlgorithm
from collective.algorithms.ring import RingAlgorithm
from collective.choice import Topology
from collective.membership.liveness import Mesh
from collective.shared_memory.algorithm import SharedMemoryAlgorithm
from collective.shared_memory.barrier import SharedMemoryBarrier
from collective.transports.tcp import TcpTransport
from collective.transports.threads import connect_threads

__all__ = ["build", "build_alone"]


def build(
    backend: str, topology: Topology, mesh: Mesh, connections: Mapping[int, socket.socket], checksum: str = "auto"
) -> Algorithm:
    """Of backend shm or tcp, over a mesh and data connections that were made by this topology."""
    if backend == "shm":
        return SharedMemoryAlgorithm(SharedMemoryBarrier(mesh, topology.local))
    transport = TcpTransport(mesh, connections, checksum=checksum)
    if topology.algorithm == "hierarchical":
        return HierarchicalAlgorithm(SharedMemoryBarrier(mesh, topology.local), transport)
    return RingAlgorithm(transport) if topology.algorithm == "ring" else BySize(transport)


def build_alone() -> Algorithm:
    """Of a group of one rank."""
    return RingAlgorithm(connect_threads(1)[0])
