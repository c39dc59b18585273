"""`python -m ps.server`: one parameter server."""

from __future__ import annotations

import resource
import signal
import sys
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from common.system.atomic_file import write_file
from common.system.memory import limit_malloc_arenas
from common.system.process import prepare_process

if TYPE_CHECKING:
    from ps.command_flags import ServerConfig
    from ps.coordinator.servicer import ParameterServer

__all__ = ["main", "prepare_server", "stop_on_sigterm"]


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
    from common.credentials.credentials import current
    from common.launch.cli import check_writable
    from common.launch.tracing import parts_folder
    from common.network.rpc import check_bind_host
    from common.paddle_api.loading import import_paddle
    from ps.coordinator.servicer import ParameterServer
    from ps.store.shards import parse_shard

    check_bind_host(config.host, current())
    host = f"[{config.host}]" if ":" in config.host else config.host
    shard = parse_shard(config.shard)
    with suppress(ImportError):  # now, so that no trainer waits for it later; without Paddle `register` says so
        import_paddle()
        import common.tensors.flat_optimizer  # noqa: F401
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
            )
        )
        stop_on_sigterm(server)
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
            server.wait()
        finally:
            server.trace.leave(parts_folder())
        print(f"training is complete: {server.steps:,} steps", flush=True)
        if straggler := server.straggler():
            print(straggler, flush=True)


def stop_on_sigterm(server: ParameterServer) -> None:
    """On SIGTERM the step under way is completed, trainers hear why, and the server ends."""

    def stop(*_: object) -> None:  # not here: the signal may have interrupted whoever holds the group's lock
        threading.Thread(target=server.stop, args=("was told to stop (SIGTERM)",), daemon=True).start()

    signal.signal(signal.SIGTERM, stop)


if __name__ == "__main__":
    sys.exit(main())
