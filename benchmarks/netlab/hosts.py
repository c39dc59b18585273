"""Where processes run: this machine as it is, or hosts emulated on it."""

from __future__ import annotations

import itertools
import secrets
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Protocol

from common.errors import UsageError
from common.launch.ranks import abstract_address

__all__ = ["FIRST_PORT", "PORTS_EACH", "Hosts", "OneHost"]

PORTS_EACH = 100
FIRST_PORT = 20000  # below the ports that the kernel gives out; nobody else is in the namespaces
BLOCKS = 120  # of PORTS_EACH, up to port 32,000


class Hosts(Protocol):
    """Where processes run; host i is counted modulo their number. A context manager."""

    emulated: bool
    environment: dict[str, str]  # for processes on them

    def __enter__(self) -> Hosts: ...

    def __exit__(self, *_: object) -> None: ...

    def within(self, host: int) -> list[str]:
        """The command that starts another one there, before that one."""

    def address(self, host: int) -> str:
        """By which the other hosts reach it."""

    def endpoints(self, hosts: Sequence[int]) -> list[str]:
        """A free HOST:PORT on each."""

    def meeting_place(self) -> str:
        """A rendezvous on host 0."""


_blocks = itertools.count(secrets.randbelow(BLOCKS))  # other programs of ours most likely begin elsewhere


class OneHost:
    """This machine as it is."""

    emulated = False
    environment: dict[str, str] = {}  # noqa: RUF012 - Protocol's

    def __enter__(self) -> OneHost:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def within(self, host: int) -> list[str]:  # noqa: ARG002
        return []

    def address(self, host: int) -> str:  # noqa: ARG002
        return "127.0.0.1"

    def endpoints(self, hosts: Sequence[int]) -> list[str]:
        """Whoever gets one may use the next PORTS_EACH too: they lie below those that the kernel gives to outgoing
        connections, of which other libraries have many."""
        return [f"127.0.0.1:{free_block()}" for _ in hosts]

    def meeting_place(self) -> str:
        return abstract_address("benchmarks")


def free_block() -> int:
    """The first of PORTS_EACH ports of this machine's loopback that nobody uses now, nor was given before.

    Raises:
        UsageError: there is none.
    """
    for _ in range(BLOCKS):
        first = FIRST_PORT + next(_blocks) % BLOCKS * PORTS_EACH
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + PORTS_EACH):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    last = FIRST_PORT + BLOCKS * PORTS_EACH - 1
    raise UsageError(f"no {PORTS_EACH} free ports in a row between {FIRST_PORT} and {last}; end what listens there")
