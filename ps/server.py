"""`python -m ps.server`: one parameter server."""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from common.system.atomic_file import write_file
from common.system.memory import limit_malloc_arenas
from common.system.process import note_done, prepare_process, restarts

if TYPE_CHECKING:
    from common.commit.kept_parts import KeptParts
    from ps.command_flags import ServerConfig
    from ps.coordinator.servicer import ParameterServer

__all__ = ["main", "prepare_server", "stop_on_sigterm"]

POLL_S = 0.02


def main(args: list[str] | None = None) -> int:
    prepare_server()
    from common.launch.cli import run_command
    from ps.command_flags import ServerConfig

    return run_command(ServerConfig, run, prog="ps.server", args=args)


def prepare_server() -> None:
    """What the process of a server does first. Its many threads receive and send what is large in turn, so that one
    arena is enough; each of many would keep the most that any thread has ever had in it."""
    prepare_process()
    limit_malloc_arenas(1)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # so that callers do not use up the usual 1,024


def run(config: ServerConfig) -> None:
    from common.commit.kept_parts import kept_here
    from common.credentials.credentials import current
    from common.errors import PeerError, PeerUnreachable
    from common.network.rpc import check_bind_host
    from common.paddle_api.loading import import_paddle
    from common.system.memory import give_memory_back

    check_bind_host(config.host, current())
    with suppress(ImportError):  # now, so that no trainer waits for it later; without Paddle `register` says so
        import_paddle()
        import common.tensors.flat_optimizer  # noqa: F401
    memory, told_to_stop = kept_here(), threading.Event()
    while True:
        try:
            serve(config, memory, told_to_stop)
            note_done()
            return
        except (PeerError, PeerUnreachable) as exc:
            if memory is None or not (memory.steps() or memory.at_beginning) or told_to_stop.is_set():
                raise
            why = f"{type(exc).__name__}: {exc}"
        print(f"goes on with the trainers that take part next, after {why}", flush=True)
        give_memory_back()
        go_on(config, why)


def go_on(config: ServerConfig, why: str) -> None:
    """Let the launcher know that this server outlives whoever has died, and wait for its word.

    Raises:
        RecoveryFailed: there was none.
    """
    from common.errors import RecoveryFailed
    from common.system.next_epoch import begin_epoch, note_waiting
    from ps.store.shards import parse_shard

    note_waiting(why)
    index, _ = parse_shard(config.shard)
    if begin_epoch(f"server {index}", config.wait_limit, is_met=True) is None:
        raise RecoveryFailed(f"the launcher gave no word to go on within {config.wait_limit:g} s (--wait-limit)")


def serve(config: ServerConfig, memory: KeptParts | None, told_to_stop: threading.Event) -> None:
    """One group of trainers, to its end.

    Args:
        memory: of the last step boundaries.
        told_to_stop: is set by a SIGTERM.
    """
    from common.credentials.credentials import current
    from common.launch.cli import check_writable
    from common.launch.tracing import parts_folder
    from ps.coordinator.servicer import ParameterServer
    from ps.store.shards import parse_shard

    host = f"[{config.host}]" if ":" in config.host else config.host
    shard = parse_shard(config.shard)
    with ExitStack() as stack:
        server = stack.enter_context(
            ParameterServer(
                f"{host}:{config.port}",
                config.nranks,
                shard=shard,
                timeout=config.timeout,
                wait_limit=config.wait_limit,
                data_port=config.data_port,
                checkpoint_dir=config.checkpoint_dir,
                memory=memory,
            )
        )
        stack.enter_context(stopped_by_sigterm(server, told_to_stop))
        print(f"server {config.shard} listens on {server.address} for {config.nranks} trainer(s)", flush=True)
        if config.address_file is not None:
            check_writable("address-file", config.address_file)
            write_file(config.address_file, f"{server.address}\n")
        if config.metrics_port is not None:
            from ps.coordinator.metrics import metrics_host, serve_metrics

            where = metrics_host(config.host, current())
            port = stack.enter_context(serve_metrics(server.status, where, config.metrics_port))
            print(f"metrics at http://{f'[{where}]' if ':' in where else where}:{port}/metrics", flush=True)
        try:
            wait_until_met(server)
            server.wait()
        finally:
            server.trace.leave(parts_folder())
        print(f"training is complete: {server.steps:,} steps", flush=True)
        if straggler := server.straggler():
            print(straggler, flush=True)


def wait_until_met(server: ParameterServer) -> None:
    """Who takes the place of another may die before it has joined: then all meet in a further epoch.

    Raises:
        PeerLost: they do.
    """
    from common.errors import PeerLost
    from common.system.next_epoch import has_begun_without_this

    while restarts() and not server.has_met:
        if has_begun_without_this():
            raise PeerLost(f"the trainers of epoch {restarts()} did not come together; the next one has begun")
        time.sleep(POLL_S)


def stop_on_sigterm(server: ParameterServer, told: threading.Event | None = None) -> None:
    """On SIGTERM `told` is set, the step under way is completed, trainers hear why, and the server ends."""

    def stop(*_: object) -> None:  # not here: the signal may have interrupted whoever holds the group's lock
        if told is not None:
            told.set()
        threading.Thread(target=server.stop, args=("was told to stop (SIGTERM)",), daemon=True).start()

    signal.signal(signal.SIGTERM, stop)


@contextmanager
def stopped_by_sigterm(server: ParameterServer, told: threading.Event) -> Iterator[None]:
    """Likewise, within; later a SIGTERM ends this process at once."""
    stop_on_sigterm(server, told)
    try:
        yield
    finally:
        if not told.is_set():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
