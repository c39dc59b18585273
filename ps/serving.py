"""A parameter server within a process that is something else besides: a program's own, or a task of an engine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from common.credentials.credentials import current
from common.launch.engines import Task
from common.launch.settings import Settings
from common.launch.tasks import meet_tasks, place_of
from common.launch.tracing import parts_folder
from common.network.rpc import check_bind_host, host_of
from common.paddle_api.loading import import_paddle
from common.system.addresses import address_of, own_host
from common.system.memory import limit_malloc_arenas
from ps.coordinator.servicer import ParameterServer
from ps.server import stop_on_sigterm

__all__ = ["find_servers", "serve"]


def serve(
    address: str,
    nranks: int,
    *,
    shard: tuple[int, int],
    limits: Settings,
    once_it_listens: Callable[[ParameterServer], object] = lambda _: None,
) -> None:
    """Serve one training at HOST:PORT; returns when all trainers have stopped. On SIGTERM, in the main thread, the step
    under way is completed and the trainers hear why, as with `python -m ps.server`.

    Args:
        shard: (I, S): this is server I of S.
        once_it_listens: given the server; its address has the port that was chosen for 0.

    Raises:
        PeerLost, PeerStalled, ...: why the training failed.
    """
    check_bind_host(host_of(address), current())
    limit_malloc_arenas(1)
    with ParameterServer(address, nranks, shard=shard, timeout=limits.timeout, wait_limit=limits.wait_limit) as server:
        once_it_listens(server)
        before = signal.getsignal(signal.SIGTERM)
        here = threading.current_thread() is threading.main_thread()
        if here:
            stop_on_sigterm(server)
        try:
            server.wait()
        finally:
            server.trace.leave(parts_folder())
            if here and before is not None:  # None: not Python's
                signal.signal(signal.SIGTERM, before)
        if straggler := server.straggler():
            print(straggler, flush=True)


def find_servers(task: Task, servers: int, limits: Settings) -> tuple[str, ...]:
    """Meet the other tasks, of which the first `servers` serve.

    Returns:
        The servers' addresses; nothing to a task that is a server, once the training that it has served is over.

    Raises:
        RendezvousError, PeerUnreachable, ...: the tasks did not come together, or the training failed.
    """
    if task.index >= servers:
        return meet_tasks(task, "", timeout=limits.timeout)[:servers]
    with suppress(ImportError):  # now, so that no trainer waits for it later; it also sets handlers of signals
        import_paddle()
    place = place_of(task)
    host = "127.0.0.1" if place.startswith("unix") else own_host(host_of(place))
    serve(
        address_of(host, 0),
        task.count - servers,
        shard=(task.index, servers),
        limits=limits,
        once_it_listens=lambda server: meet_tasks(task, server.address, timeout=limits.timeout),
    )
    return ()
