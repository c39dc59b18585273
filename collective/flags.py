"""How the ranks of a ring exchange gradients: each field is a flag, and a variable that launchers set for scripts."""

from __future__ import annotations

from dataclasses import dataclass

from collective.choice import ALGORITHMS, BACKENDS
from collective.group import Group, connect
from collective.nccl.binding import BINDINGS
from common.credentials.credentials import current
from common.errors import UsageError, choose
from common.launch.settings import Settings
from common.network.links import CHECKSUMS
from common.network.rpc import check_bind_host, host_of

__all__ = ["RingSettings", "connect_with"]


@dataclass(frozen=True, kw_only=True)
class RingSettings(Settings):
    """Of all ranks alike."""

    backend: str = "auto"
    """What carries the gradients: shm, tcp, nccl, nccl-ring, or auto (nccl if each rank has a GPU, else shm or tcp)."""
    nccl_binding: str = "cupy"
    """How NCCL is called: cupy or pynccl."""
    device: str = "cpu"
    """Where the model computes: cpu, the only one so far; with NCCL gradients are copied to the GPUs and back."""
    algorithm: str = "auto"
    """How they travel: ring (tcp and nccl), direct, hierarchical (shared memory inside each host), or auto."""
    checksum: str = "auto"
    """Check what tcp carries: on, off, or auto (on between hosts)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("backend", self.backend, BACKENDS)
        choose("NCCL binding", self.nccl_binding, BINDINGS)
        if self.device != "cpu":  # gpu, auto and what is no device at all: nothing else works yet
            raise UsageError(
                f"--device {self.device}: only cpu works, training on the GPU is not built yet; --backend nccl "
                "computes on the CPU and reduces the gradients on GPUs (choose them with --devices)"
            )
        choose("algorithm", self.algorithm, ALGORITHMS)
        choose("checksum", self.checksum, CHECKSUMS)


def connect_with(settings: RingSettings, rank: int, nranks: int, rendezvous: str) -> Group:
    """As `collective.connect`."""
    if not rendezvous.startswith("unix"):
        check_bind_host(host_of(rendezvous), current())
    return connect(
        rank,
        nranks,
        rendezvous,
        settings.backend,
        algorithm=settings.algorithm,
        checksum=settings.checksum,
        device=settings.device,
        nccl_binding=settings.nccl_binding,
        timeout=settings.timeout,
        wait_limit=settings.wait_limit,
    )
