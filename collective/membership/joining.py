"""How the ranks of a group come together: at a rendezvous, where rank 0 listens, and then each with each."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from collective.membership.connections import Listener, build_mesh
from collective.membership.liveness import Mesh
from common.errors import PortInUse, ProtocolError
from common.network.patience import WAIT_LIMIT_S
from common.network.rendezvous import RendezvousServer, join
from common.system.addresses import host_identity
from common.system.process import restarts

__all__ = ["Meeting", "Met", "introduce_outsider"]


TELL_S = 2.0


@dataclass(frozen=True)
class Met:
    """What each rank told all others, in rank order."""

    addresses: Sequence[str]  # of listeners, for TCP
    local_addresses: Sequence[str]  # likewise, for Unix sockets
    hosts: Sequence[str]  # equal for ranks of one host
    notes: Sequence[bytes]
    token: bytes


class Meeting:
    """One rank's part in it; a context manager, over once the ranks are connected.

    Args:
        rendezvous: HOST:PORT or unix-abstract:NAME.
        host: this machine's address, as the other ranks reach it; "" if all are on this host and use Unix sockets.
        timeout: of each wait, in seconds.

    Raises:
        PortInUse: rank 0 cannot listen there.
        RendezvousError: because there is another rank 0.
    """

    def __init__(self, rendezvous: str, rank: int, nranks: int, *, host: str, timeout: float) -> None:
        self._rank, self._nranks, self._host, self._timeout = rank, nranks, host, timeout
        with ExitStack() as opened:
            self._rendezvous = rendezvous
            if rank == 0:
                try:
                    server = RendezvousServer(rendezvous, nranks, timeout=timeout, epoch=restarts())
                except PortInUse:
                    if rendezvous.startswith("unix-abstract:"):  # such a name only another rank 0 has: tell its group
                        introduce_outsider(rendezvous, 0, nranks, TELL_S)
                    raise
                self._rendezvous = opened.enter_context(server).address
            self._listener = opened.enter_context(Listener(host, f"gradsync-{secrets.token_hex(8)}"))
            self._opened = opened.pop_all()

    def introduce(self, plan: str, note: bytes = b"") -> Met:
        """Tell the others of this rank, and wait until all have come.

        Args:
            plan: what the group is to be, in words; must be equal on all ranks.

        Raises:
            RendezvousError, VersionMismatch, PeerUnreachable: the ranks do not come together, or contradict each other.
        """
        listener = self._listener
        address = "|".join((listener.address, listener.local_address, host_identity(self._host)))
        told = join(
            self._rendezvous,
            rank=self._rank,
            nranks=self._nranks,
            backend=plan,
            address=address,
            timeout=self._timeout,
            note=note,
            epoch=restarts(),
        )
        if len(told.addresses) != self._nranks or len(told.notes) != self._nranks:
            raise ProtocolError(f"rank 0 told of {len(told.addresses)} ranks, not {self._nranks}")
        columns = zip(*(parts_of(rank, member) for rank, member in enumerate(told.addresses)), strict=True)
        addresses, local_addresses, hosts = map(list, columns)
        return Met(addresses, local_addresses, hosts, told.notes, told.token)

    def connect(
        self, met: Met, *, near: Sequence[int], data: Collection[int], wait_limit: float = WAIT_LIMIT_S
    ) -> tuple[Mesh, dict[int, socket.socket]]:
        """The mesh, and the data connections.

        Args:
            near: the ranks with which this one shares memory.
            data: those with which it exchanges data over TCP.
            wait_limit: how long it will wait for a rank that lives, in seconds.

        Raises:
            RendezvousError: a rank that had joined did not connect in time.
        """
        pairs = zip(met.addresses, met.local_addresses, strict=True)
        addresses = [there if rank in near else away for rank, (away, there) in enumerate(pairs)]
        return build_mesh(
            self._rank,
            addresses,
            self._listener,
            met.token,
            data=data,
            near=near,
            timeout=self._timeout,
            wait_limit=wait_limit,
        )

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def introduce_outsider(rendezvous: str, rank: int, nranks: int, seconds: float) -> None:
    """Let the others know of a rank that is beyond the group's.

    Raises:
        RendezvousError: that is what they hear, too.
        PeerUnreachable: nobody is there.
    """
    join(rendezvous, rank=rank, nranks=nranks, backend="", address="", timeout=seconds, epoch=restarts())


def parts_of(rank: int, told: str) -> list[str]:
    """Address, local address and host, as a rank has told them.

    Raises:
        ProtocolError: they are not that.
    """
    parts = told.split("|")
    host, _, port = parts[0].rpartition(" ")
    ascii_digits = port.isascii() and port.isdecimal() and len(port) <= 5
    if len(parts) != 3 or (parts[0] and not (host and ascii_digits and int(port) < 65536)) or "\0" in told:
        raise ProtocolError(f"rank {rank} told no address: {told[:80]!r}")
    return parts
