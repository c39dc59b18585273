"""The ring's transport over TCP: data connections to the right neighbour and from the left one."""

from __future__ import annotations

import numpy as np

from collective.transports.base import Array, Tag, Transport
from collective.transports.links import Links

__all__ = ["TcpTransport"]


class TcpTransport(Transport):
    name = "tcp"
    segment_bytes = 512 * 1024

    def __init__(self, links: Links, nranks: int) -> None:
        self.rank, self.nranks = links.mesh.rank, nranks
        self.links = links
        self._payload = np.empty(self.segment_bytes, np.uint8)

    def send(self, array: Array, tag: Tag) -> None:
        self.links.send(self.right, array, tag)

    def receive(self, like: Array, tag: Tag) -> Array:
        out: Array = self._payload[: like.nbytes].view(like.dtype)
        self.links.receive(self.left, out, tag)
        return out

    def receive_into(self, out: Array, tag: Tag) -> None:
        self.links.receive(self.left, out, tag)

    def flush(self) -> None:
        self.links.flush()

    def close(self, reason: str = "") -> None:
        self.links.close(reason)
