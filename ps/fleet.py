"""Fleet's and paddle.distributed's names over parameter servers, and those of Paddle's removed parameter server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common.errors import UsageError
from common.launch.adopting import adopted
from common.launch.settings import Placement, Settings, placement_from, servers_among, settings_from
from common.paddle_api.fleet_api import FleetApi
from common.paddle_api.names import OWN, PUBLIC, SERVER_SIDE, own_of_paddle
from common.paddle_api.roles import arguments_of, is_user_defined
from common.sync.synchronizer import Synchronizer
from common.system.addresses import parse_addresses
from ps.client.client import Client
from ps.flags import ScriptSettings
from ps.serving import find_servers, serve
from ps.synchronizer import ServerSynchronizer

__all__ = ["PaddleCloudRoleMaker", "UserDefinedRoleMaker", "surface"]


class PaddleCloudRoleMaker:
    """Roles from a launcher's environment: TRAINING_ROLE, POD_IP, PADDLE_PORT, PADDLE_PSERVERS_IP_PORT_LIST."""

    def __init__(self, is_collective: bool = False, **_: Any) -> None:
        self.is_collective = is_collective
        self.placement = placement_from()
        self.is_server = os.environ.get("TRAINING_ROLE", "TRAINER").upper() == "PSERVER"
        self.endpoint = f"{os.environ.get('POD_IP', '127.0.0.1')}:{os.environ.get('PADDLE_PORT', '')}"


class UserDefinedRoleMaker:
    """Roles written in the program.

    Args:
        current_id: this server's or this worker's number.
        role: paddle's Role.SERVER (2) or Role.WORKER (1), or "server" or "worker".
        worker_num: number of trainers.
        server_endpoints: HOST:PORT of every server.
    """

    def __init__(
        self,
        is_collective: bool = False,
        *,
        current_id: int = 0,
        role: Any = 1,
        worker_num: int = 1,
        server_endpoints: Any = (),
        **_: Any,
    ) -> None:
        self.is_collective = is_collective
        servers = tuple(server_endpoints)
        self.is_server = str(role).lower() in ("2", "server", "role.server")
        self.endpoint = servers[current_id] if self.is_server else ""
        rank = 0 if self.is_server else current_id
        self.placement = replace(placement_from(), rank=rank, nranks=worker_num, servers=servers)


def role_from(role_maker: Any, *, is_collective: bool) -> PaddleCloudRoleMaker | UserDefinedRoleMaker:
    """The role maker that `fleet.init` was given, or ours in place of Paddle's own, or of none."""
    if role_maker is None:
        return PaddleCloudRoleMaker(is_collective)
    if isinstance(role_maker, (PaddleCloudRoleMaker, UserDefinedRoleMaker)):
        return role_maker
    arguments = arguments_of(role_maker)
    return (UserDefinedRoleMaker if is_user_defined(role_maker) else PaddleCloudRoleMaker)(**arguments)


class ServerFleetApi(FleetApi):
    """The surface with a server side."""

    def __init__(self) -> None:
        super().__init__("ps", join)
        self._role: Any = None
        self._server_ready = False

    def init(
        self, role_maker: Any = None, is_collective: bool = False, strategy: Any = None, log_level: Any = "INFO"
    ) -> Any:
        """As fleet.init. A server, and a worker that calls `init_worker`, joins its group then and not here."""
        self._role = role_from(role_maker, is_collective=is_collective)
        self.placement = self._role.placement
        self._begin(role_maker, strategy, log_level, is_collective=is_collective)
        if is_collective or role_maker is None or self._role.is_collective:
            if self._role.is_server:
                return self
            self.init_parallel_env()
            self.get_hybrid_communicate_group()
        return self

    def is_server(self) -> bool:
        self._each_is_first = False  # a program that asks is one with servers, whose workers differ
        return self._serves()

    def _serves(self) -> bool:
        return self._role is not None and bool(self._role.is_server)

    def server_index(self) -> int:
        servers, endpoint = self.placement.servers, getattr(self._role, "endpoint", "")
        return servers.index(endpoint) if endpoint in servers else super().server_index()

    def init_server(self, *_: Any, **__: Any) -> None:
        """Prepare to serve. Parameters come from trainer 0, so a model folder is not needed and not read."""
        if not self.is_server():
            raise UsageError("init_server: this process is a worker; call it only if is_server()")
        self._server_ready = True

    def run_server(self) -> None:
        """Serve one training; returns when all workers have stopped. On SIGTERM, in the main thread, the step under way
        is completed and the workers hear why, as with `python -m ps.server`.

        Raises:
            PeerLost, PeerStalled, ...: why the training failed.
        """
        if not self._server_ready:
            self.init_server()
        placement, endpoint = self._role.placement, self._role.endpoint
        if endpoint not in placement.servers:
            raise UsageError(f"run_server: {endpoint} is not among the servers {', '.join(placement.servers)}")
        shard = (placement.servers.index(endpoint), len(placement.servers))
        serve(endpoint, placement.nranks, shard=shard, limits=settings_from(Settings))

    def init_worker(self, *_: Any, **__: Any) -> None:
        """Join the group; blocks until all workers and servers are there."""
        self._each_is_first = False
        self.init_parallel_env()

    def stop_worker(self) -> None:
        """Leave the group; the servers end when all workers have."""
        self.leave()


def join(place: Placement) -> Synchronizer:
    """
    Raises:
        SystemExit: this process is a task that serves, and has; with code 0.
    """
    settings, servers = settings_from(ScriptSettings), place.servers
    if not servers:
        task = adopted()
        count = servers_among(task) if task is not None else 0
        if task is None or not count:
            or_so = f"; or with GRADSYNC_SERVERS=S, and the first S tasks of {task.engine} serve" if task else ""
            raise UsageError(
                "this program uses ps, but no server was started for it: "
                f"start it with python -m ps.run, or import collective instead{or_so}"
            )
        servers = find_servers(task, count, settings)
        if not servers:
            raise SystemExit(0)

    def connect(servers: Sequence[str]) -> Client:
        return Client(servers, place.rank, place.nranks, timeout=settings.timeout, data_plane=settings.data_plane)

    def connect_anew(servers: str) -> Client:
        return connect(parse_addresses(servers))

    return ServerSynchronizer(connect(servers), overlap=settings.overlap, update=settings.update, connect=connect_anew)


surface = ServerFleetApi()


def __getattr__(name: str) -> Any:
    """So that `from ps import fleet` has Fleet's names."""
    if name not in (known := (*OWN, *PUBLIC, *SERVER_SIDE)):
        return own_of_paddle(__name__, name, known)
    return getattr(surface, name)
