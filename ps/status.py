"""`python -m ps.status --servers HOST:PORT,...`: how a training goes, as a table that keeps itself up to date."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from common.system.process import prepare_process

if TYPE_CHECKING:
    import grpc
    from rich.console import RenderableType

    from common.credentials.credentials import Credentials
    from common.network.gradsync_pb2 import StatusReply
    from ps.command_flags import StatusConfig

__all__ = ["main"]


def main(args: list[str] | None = None) -> int:
    prepare_process()
    from common.launch.cli import run_command
    from ps.command_flags import StatusConfig

    return run_command(StatusConfig, run, prog="ps.status", args=args)


def run(config: StatusConfig) -> None:
    from rich.console import Console
    from rich.live import Live

    from common.errors import PeerLost
    from common.network import rpc
    from common.system.addresses import parse_addresses

    console = Console()
    addresses = parse_addresses(config.servers)
    with ExitStack() as stack:
        channels = [
            stack.enter_context(rpc.connect(address, timeout=config.timeout, credentials=credentials_for(address)))
            for address in addresses
        ]
        replies = ask(addresses, channels, config.timeout)
        if config.once or not console.is_terminal:
            console.print(table_of(addresses, replies))
            return
        live = stack.enter_context(Live(table_of(addresses, replies), console=console, auto_refresh=False))
        try:
            while any(reply.state in ("waiting for trainers", "training") for reply in replies):
                time.sleep(config.interval)
                replies = ask(addresses, channels, config.timeout)
                live.update(table_of(addresses, replies), refresh=True)
        except PeerLost:
            live.stop()
            console.print("the servers have ended")
        except KeyboardInterrupt:
            live.stop()


def credentials_for(address: str) -> Credentials:
    """Ours; if we were given none, those that a launcher of this user's gave the server of that address."""
    from common.credentials.credentials import current
    from common.credentials.of_listener import credentials_at
    from common.network.rpc import host_of, is_loopback

    if current().kind != "user" or not is_loopback(host_of(address)):
        return current()
    return credentials_at(int(address.rpartition(":")[2])) or current()


def ask(addresses: Sequence[str], channels: Sequence[grpc.Channel], timeout: float) -> list[StatusReply]:
    """Every server's status; each may take `timeout` seconds to tell.

    Raises:
        PeerLost, PeerStalled: naming the server.
    """
    import grpc

    from common.network import rpc
    from common.network.gradsync_pb2 import StatusReply, StatusRequest
    from ps.planes.methods import STATUS

    found = []
    for address, channel in zip(addresses, channels, strict=True):
        call = channel.unary_unary(
            STATUS, request_serializer=StatusRequest.SerializeToString, response_deserializer=StatusReply.FromString
        )
        try:
            found.append(call(StatusRequest(), timeout=timeout))
        except grpc.RpcError as exc:
            raise rpc.translate(exc, f"the server at {address}", "telling its status") from exc
    return found


def table_of(addresses: Sequence[str], replies: Sequence[StatusReply]) -> RenderableType:
    """One line a server, then one a trainer, whose figures are those of the slowest of its servers."""
    from rich.console import Group
    from rich.table import Table

    servers = Table(
        "server", "address", "steps", "parameters MB", "state", box=None, pad_edge=False, header_style="bold"
    )
    for address, reply in zip(addresses, replies, strict=True):
        of = f"{reply.shard}/{reply.shards}"
        state = f"{reply.state}, {reply.models} models" if reply.models > 1 else reply.state  # figures: of the first
        if reply.restarts:
            state += f", {reply.restarts} restart{'s' * (reply.restarts > 1)} so far"
        servers.add_row(of, address, f"{reply.steps:,}", f"{reply.parameters * 4e-6:.1f}", state)
    trainers = Table(
        "rank",
        "data",
        "steps",
        "last in",
        "lag ms",
        "behind",
        "pushed MB",
        "served MB",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for rank in sorted({t.rank for reply in replies for t in reply.trainers}):
        seen = [t for reply in replies for t in reply.trainers if t.rank == rank]
        worst = max(seen, key=lambda t: t.lag)
        ended = max(1, replies[0].steps)
        trainers.add_row(
            str(rank) + (" (left)" if all(t.left for t in seen) else ""),
            "+".join(sorted({t.data_plane for t in seen if t.data_plane}, reverse=True)) or "-",
            f"{min(t.steps for t in seen):,}",
            f"{worst.times_last / ended:.0%}",
            f"{1000 * worst.lag:.1f}",
            f"{max(behind(reply, rank) for reply in replies):,}",
            f"{sum(t.bytes_pushed for t in seen) / 1e6:,.1f}",
            f"{sum(t.bytes_served for t in seen) / 1e6:,.1f}",
        )
    return Group(servers, "", trainers) if trainers.row_count else servers


def behind(reply: StatusReply, rank: int) -> int:
    """How many steps a trainer is behind the one that is furthest ahead, as this server sees it; 0 once it has left."""
    mine = next((t for t in reply.trainers if t.rank == rank and not t.left), None)
    return 0 if mine is None else max(t.steps for t in reply.trainers) - mine.steps


if __name__ == "__main__":
    sys.exit(main())
