"""What ranks are started with: their command lines, the names of their places, and Paddle's variables."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from common.system.addresses import address_of

__all__ = ["FIRST_PORT", "abstract_address", "endpoints_of", "flags_of", "name_of", "paddle_environment"]

FIRST_PORT = 6170  # in the names of ranks, as Paddle has it


def flags_of(config: Any, *, without: Sequence[str] = ()) -> list[str]:
    """The command-line flags that make this configuration again; defaults, and fields in `without`, are left out."""
    flags: list[str] = []
    for entry in fields(config):
        value = getattr(config, entry.name)
        if value == entry.default or entry.name in without:
            continue
        name = entry.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", str(value)]
    return flags


def name_of(program: Sequence[str]) -> str:
    """Of a user's program, `script.py ARGS` or `-m package.module ARGS`."""
    return " ".join(program[: 1 + (program[0] == "-m")])


def abstract_address(name: str) -> str:
    """A gRPC address in Linux's abstract socket namespace: no port to be taken, no file to be left."""
    return f"unix-abstract:gradsync-{name}-{secrets.token_hex(8)}"


def endpoints_of(hosts: Sequence[str], ranks_each: int) -> tuple[str, ...]:
    """A name for every rank in the form that Paddle gives it: its host and a port. Nobody listens there."""
    return tuple(address_of(host, FIRST_PORT + local) for host in hosts for local in range(ranks_each))


def paddle_environment(
    rank: int, endpoints: Sequence[str], *, nnodes: int = 1, local: int | None = None
) -> dict[str, str]:
    """What Paddle's own launcher tells a rank; `paddle.io.DistributedBatchSampler` reads it.

    Args:
        endpoints: of all ranks.
        nnodes: the number of hosts.
        local: which of its host's ranks it is; None: each host has equally many, one host after the other.
    """
    if local is None:
        local = rank % (len(endpoints) // nnodes)
    return {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(endpoints)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_LOCAL_RANK": str(local),
        "PADDLE_RANK_IN_NODE": str(local),
        "PADDLE_NNODES": str(nnodes),
    }
