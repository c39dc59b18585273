"""Who takes part in a comparison: a scheme with its back end, on a number of ranks.

A new library's trainings are a module as torch_training.py and a line here; docs/architecture.md names the other
places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import choose
from ps.store.modes import SYNC, parse_mode

__all__ = ["OTHER_ORDER", "PADDLE_SCHEMES", "RIVALS", "SCHEMES", "TORCH", "Contestant", "line_up"]

SCHEMES = ("local", "ps", "ring")
PADDLE_SCHEMES = ("paddle", "paddle-default")  # paddle.DataParallel with our settings of the process, and with its own
TORCH = "torch-ddp"  # PyTorch's DistributedDataParallel
RIVALS = {  # other libraries, over Gloo, which adds in another order; as reports call them
    "paddle": "paddle.DataParallel",
    "paddle-default": "paddle.DataParallel",
    TORCH: "torch DistributedDataParallel",
}
OTHER_ORDER = "other-order"  # the ring's sums in another order: no contestant, but what rounding does to one
TRAINED = (*SCHEMES, PADDLE_SCHEMES[0], TORCH)  # of the built-in training


@dataclass(frozen=True)
class Contestant:
    """One column of the comparison."""

    scheme: str
    backend: str  # "none", "grpc", "shm", "tcp"
    nranks: int
    servers: int = 0
    mode: str = "sync"  # of parameter servers
    sharded: bool = False  # the ring's optimizer
    mkl_chooses: bool = False  # the matrix kernels: what paddle-default is held against, and no contestant

    @property
    def in_step(self) -> bool:
        """Whether it computes the same as the others."""
        return parse_mode(self.mode).in_step

    @property
    def exact(self) -> bool:
        """Whether it must end in the same bits as the others."""
        return self.in_step and self.scheme not in RIVALS

    @property
    def name(self) -> str:
        """As people read it: "ring/tcp N=4", "ps/shm N=2 S=2", "ps/shm N=4 async", "ring/shm N=4 sharded"."""
        backend = f"/{self.backend}" if self.scheme in ("ps", "ring") else ""
        servers = f" S={self.servers}" if self.servers > 1 else ""
        mode = "" if self.mode == "sync" else f" {self.mode}"
        sharded = " sharded" if self.sharded else ""
        kernels = " MKL=auto" if self.mkl_chooses else ""
        return f"{self.scheme}{backend} N={self.nranks}{servers}{mode}{sharded}{kernels}"

    @property
    def stem(self) -> str:
        """Its name as a file's."""
        return self.name.replace("/", "-").replace(" ", "_")


def line_up(
    schemes: Sequence[str],
    nranks: Sequence[int],
    backends: Sequence[str],
    servers: Sequence[int],
    data_planes: Sequence[str],
    ps_modes: Sequence[str] = ("sync",),
    *,
    shard_optimizer: bool = False,
) -> list[Contestant]:
    """Every sensible combination, by number of ranks.

    `local` takes part with one rank only. One rank has nobody to talk to, so there one server and the first back end
    or data plane stand for all; the other data planes take part with the first number of servers only. Modes other than
    sync take part with the first of both, and with several ranks.

    Raises:
        UsageError: an unknown scheme or mode.
    """
    modes = [str(parse_mode(mode)) for mode in ps_modes]
    others = [mode for mode in modes if mode != str(SYNC)]
    found: list[Contestant] = []
    for count in sorted(set(nranks)):
        for scheme in schemes:
            choose("scheme", scheme, TRAINED)
            if scheme == "local" and count == 1:
                found.append(Contestant("local", "none", 1))
            elif scheme == "ps":
                pairs = [(data_planes[0], s) for s in servers] + [(plane, servers[0]) for plane in data_planes[1:]]
                if str(SYNC) in modes:
                    found += [Contestant("ps", plane, count, s) for plane, s in (pairs if count > 1 else pairs[:1])]
                if count > 1:
                    found += [Contestant("ps", data_planes[0], count, servers[0], mode) for mode in others]
            elif scheme in RIVALS:
                found.append(Contestant(scheme, "gloo", count))
            elif scheme == "ring":
                found += [Contestant("ring", b, count) for b in (backends if count > 1 else backends[:1])]
                if shard_optimizer and count > 1:
                    found.append(Contestant("ring", backends[0], count, sharded=True))
    return found
