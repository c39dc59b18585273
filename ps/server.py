"""`python -m ps.server`: one parameter server."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from common.process import prepare_process

if TYPE_CHECKING:
    from ps.config import ServerConfig

__all__ = ["main"]


def main(args: list[str] | None = None) -> int:
    prepare_process()
    from common.cli import run_command
    from ps.config import ServerConfig

    return run_command(ServerConfig, run, prog="ps.server", args=args)


def run(config: ServerConfig) -> None:
    from common.entry import check_writable
    from common.rpc import check_bind_host
    from ps.servicer import ParameterServer
    from ps.shards import parse_shard

    check_bind_host(config.host, insecure=config.insecure)
    host = f"[{config.host}]" if ":" in config.host else config.host
    shard = parse_shard(config.shard)
    with ParameterServer(f"{host}:{config.port}", config.nranks, shard=shard, timeout=config.timeout) as server:
        print(f"server {config.shard} listens on {server.address} for {config.nranks} trainer(s)", flush=True)
        if config.address_file is not None:
            check_writable("address-file", config.address_file)
            config.address_file.write_text(f"{server.address}\n")
        with suppress(ImportError):  # now, so that no trainer waits for it later; without Paddle `register` says so
            import common.flat_optimizer  # noqa: F401
        server.wait()
        print(f"training is complete: {server.steps:,} steps", flush=True)


if __name__ == "__main__":
    sys.exit(main())
